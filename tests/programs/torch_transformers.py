"""A transformers training of a model made on the spot; puts up as facts-RANK where its Trainer thinks that it is."""

import json
import os
import sys

import torch
from signs import RANK, put
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

tiny = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
)
model = LlamaForCausalLM(tiny)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=2,
    max_steps=2,
    save_strategy="no",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
sentences = [{"input_ids": torch.arange(8) + i % 8, "labels": torch.arange(8) + i % 8} for i in range(16)]
trainer = Trainer(model=model, args=arguments, train_dataset=sentences)
trainer.train()
facts = {
    "rank": arguments.process_index,
    "world_size": arguments.world_size,
    "mode": arguments.parallel_mode.name,
    "wrapped": type(trainer.model_wrapped).__name__,
    "weights": torch.cat([parameter.detach().flatten()[:4] for parameter in model.parameters()]).tolist(),
}
put(f"facts-{RANK}", json.dumps(facts))
torch.distributed.destroy_process_group()
os._exit(0)  # with threads of its own alive, torch 2.13 now and then aborts at the interpreter's end
