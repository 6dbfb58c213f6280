"""Train a tiny model with transformers' Trainer into the directory given; rank 1 is killed once, in its first life."""

import gc
import os
import signal
import sys

import torch
import torch.distributed.nn  # now: imported by DDP, after the group was made, it keeps the group for ever (torch 2.13)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

directory = sys.argv[1]
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Numbers(torch.utils.data.Dataset):
    """Rows of numbers that count up."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        row = torch.arange(index, index + 8) % 50
        return {"input_ids": row, "labels": row}


class Crash(TrainerCallback):
    """Kills rank 1 before the fourth step, once all have saved the third."""

    def on_step_begin(self, _args, state, _control, **_):
        """Kill, maybe."""
        if life == 0 and state.global_step == 3:
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
# From a configuration, not from the hub: random weights, no download.
config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    directory,
    max_steps=6,
    per_device_train_batch_size=2,
    save_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Numbers(), callbacks=[Crash()])
last = get_last_checkpoint(directory) if os.path.isdir(directory) else None
trainer.train(resume_from_checkpoint=last)
how = os.path.basename(last) if last else "nothing"
line = (
    f"rank {torch.distributed.get_rank()} of {arguments.world_size}, from {how} to step {trainer.state.global_step}\n"
)
os.write(1, line.encode())
# torch 2.13 can crash or hang at the end where a model in DDP outlives its group.
del trainer
gc.collect()
torch.distributed.destroy_process_group()
