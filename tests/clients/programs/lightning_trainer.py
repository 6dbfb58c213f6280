"""Train with lightning's Trainer into the directory given; rank 1 is killed once, in its first life."""

import gc
import os
import signal
import sys
from pathlib import Path

import lightning
import torch
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)

directory = Path(sys.argv[1])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Model(lightning.LightningModule):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        """Compute the loss of one step."""
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        """Make the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Crash(lightning.Callback):
    """Kills rank 1 in the second epoch, once all have saved the first."""

    def on_train_epoch_start(self, trainer, _):
        """Kill, maybe."""
        trainer.strategy.barrier()
        if life == 0 and trainer.current_epoch == 1 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


saved = directory / "last.ckpt"
resumes = saved.exists()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Crash(), lightning.pytorch.callbacks.ModelCheckpoint(directory, save_last=True)],
)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 4)), batch_size=4)
trainer.fit(Model(), loader, ckpt_path=saved if resumes else None)
environment = type(trainer.strategy.cluster_environment).__name__
how = "resumed" if resumes else "from nothing"
line = f"rank {trainer.global_rank} of {trainer.world_size}, {environment}, {how}, step {trainer.global_step}\n"
os.write(1, line.encode())
trainer.strategy.barrier()
# torch 2.13 can crash or hang at the end where a model in DDP outlives its group.
del trainer
gc.collect()
torch.distributed.destroy_process_group()
