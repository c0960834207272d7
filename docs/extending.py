"""A run with code of its own: the same arguments and launchers as pretrain/run.py.

python docs/extending.py --config configs/quickstart.yaml run.name=extended parallel.strategy=single
torchrun --nproc-per-node 8 docs/extending.py --config my.yaml
"""

import sys

import torch

from pretrain.observe.sinks import Sink
from pretrain.run import main
from pretrain.train.callbacks import Callback, EarlyStopping, KeepBest


class CsvFile(Sink):
    """Every number of every logged step on a line of its own."""

    def open(self, directory, config, step):
        self.file = (directory / "metrics.csv").open("a", encoding="utf-8")

    def write(self, record):
        self.file.writelines(f"{record.step},{name},{value}\n" for name, value in record.numbers().items())
        self.file.flush()

    def close(self):
        self.file.close()


class Counting(Callback):
    """How well the model counts: its loss on the ids n, n+1, n+2, ..., every few steps. Each rank begins at another n."""

    def __init__(self, every_steps):
        self.every_steps = every_steps

    def evaluate(self, run, step):
        if step % self.every_steps:
            return {}
        length = run.config.data.sequence_length
        ids_BT = (torch.arange(length + 1)[None] + run.mesh.data_rank) % run.config.model.vocab_size
        loss = run.losses(tokens_BT=ids_BT[:, :-1], targets_BT=ids_BT[:, 1:]).double().sum()
        total = run.mesh.sum_over_data("loss of counting", loss)
        return {"counting": float(total) / (length * run.mesh.data_size)}


if __name__ == "__main__":
    best = "evaluation/counting"
    callbacks = [Counting(every_steps=2), EarlyStopping(patience=5, metric=best), KeepBest(count=2, metric=best)]
    sys.exit(main(callbacks=callbacks, sinks=[CsvFile()]))
