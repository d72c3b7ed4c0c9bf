"""Forked from a process that has trained with one thread, children train and give its bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, os, sys
import numpy as np, torch
torch.set_num_threads(1)
from edgefl.experiment import Data, Model
from edgefl.learning.data import load_data
from edgefl.learning.flat import FlatModel
from edgefl.learning.flops import flops_per_example
from edgefl.learning.models import make_model
from edgefl.learning.rule import LocalRule
from edgefl.learning.train import Trainer
from edgefl.learning.train import evaluate
from edgefl.seeds import stream

data = load_data(Data(max_examples=128), seed=0)
flat = FlatModel(make_model(Model(name=sys.argv[1]), data.input_shape, data.classes, seed=0))
flops_per_example(flat.module, data.input_shape)
trainer, start = Trainer(flat), flat.array.copy()
rule = LocalRule(steps=3, batch_size=16, momentum=0.9)

def say(line):
    os.write(1, f"{line}\\n".encode())  # one call, so that two children's lines do not mix

def trip():
    flat.load(start)
    result = trainer.run(data.train_x, data.train_y, rule, stream(0, "batches", 1, 2))
    test = evaluate(flat, data.test_x, data.test_y, data.classes)
    return f"{hashlib.sha256(flat.array.tobytes()).hexdigest()} {result} {test.loss} {test.correct.tolist()}"

say(trip())
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        say(trip())
        os._exit(0)
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
say(trip())
say(f"compiler {'torch._dynamo' in sys.modules} sklearn {'sklearn' in sys.modules}")
say(f"threads {len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 1}")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("model", ["mlp", "cnn-groupnorm"])
def test_children_train_to_the_parents_bits(model):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, model],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    *trips, imported, threads = done.stdout.splitlines()
    assert len(trips) == 4
    assert len(set(trips)) == 1
    # What the parent imports every client holds: the compiler is 60 MiB, scikit-learn brings OpenMP.
    assert imported == "compiler False sklearn False"
    assert threads == "threads 1"
