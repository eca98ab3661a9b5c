"""A worker that draws a progress bar of 30 steps by the package that is named; it waits for a sign when half is done.

A trainer puts up as facts-RANK where it thinks that it is, and what it has trained.
"""

import json
import sys

from signs import RANK, put, wait

HALF = 15


def step(done: int) -> None:
    if done == HALF:
        put(f"half-{RANK}")
        wait("go")


def rich() -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress

    with Progress("[red]{task.description}", BarColumn(None), MofNCompleteColumn()) as progress:
        outer = progress.add_task("epochs", total=2)
        for _ in range(2):
            task = progress.add_task("steps", total=30)
            for done in range(1, 31):
                progress.advance(task)
                step(done)
            progress.advance(outer)


def tqdm() -> None:
    from tqdm import tqdm

    with tqdm(total=30, desc="steps", mininterval=0) as bar:
        for done in range(1, 31):
            bar.update()
            step(done)


def facts(model, **of_trainer: object) -> None:
    weights = [number for parameter in model.parameters() for number in parameter.detach().flatten()[:4].tolist()]
    put(f"facts-{RANK}", json.dumps({**of_trainer, "weights": weights}))


def lightning() -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Steps(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            bar = getattr(trainer.progress_bar_callback, "progress", None)  # on rank 0 alone
            if bar is not None:
                bar.refresh()  # Lightning's thread forgets a state that comes while it draws the one before
            step(number)

    model = BoringModel()
    trainer = Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=30, limit_val_batches=0,
        logger=False, enable_checkpointing=False, enable_model_summary=False, callbacks=[Steps()],
    )  # fmt: skip
    trainer.fit(model)
    environment = type(trainer.strategy.cluster_environment).__name__
    place = {"rank": trainer.global_rank, "world_size": trainer.world_size}
    facts(model, environment=environment, steps=trainer.global_step, **place)


def transformers() -> None:
    import torch
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            for bar in tqdm._instances:
                bar.refresh()  # which it does by itself every 0.1 s, and only at a step
            step(state.global_step - 1)

    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    arguments = TrainingArguments(output_dir=sys.argv[2], max_steps=30, save_strategy="no", use_cpu=True, report_to=[])
    sentences = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(16)]
    model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0))
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences, callbacks=[Steps()])
    trainer.train()
    place = {"rank": arguments.process_index, "world_size": arguments.world_size}
    facts(model, mode=arguments.parallel_mode.name, wrapped=type(trainer.model_wrapped).__name__, **place)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


globals()[sys.argv[1]]()
