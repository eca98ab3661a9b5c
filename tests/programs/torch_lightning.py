"""A Lightning training as its users write it; puts up as facts-RANK where its Trainer thinks that it is."""

import json

import torch
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from signs import RANK, put

model = BoringModel()
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    limit_train_batches=4,
    limit_val_batches=1,
    logger=False,
    enable_checkpointing=False,
    enable_model_summary=False,
    enable_progress_bar=False,
)
trainer.fit(model)
facts = {
    "environment": type(trainer.strategy.cluster_environment).__name__,
    "rank": trainer.global_rank,
    "world_size": trainer.world_size,
    "steps": trainer.global_step,
    "weights": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(),
}
put(f"facts-{RANK}", json.dumps(facts))
