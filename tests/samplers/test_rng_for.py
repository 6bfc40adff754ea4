import os
import subprocess
import sys

from moontide.samplers import rng_for

DRAW = """
import numpy as np
from moontide.samplers import BatchSampler, StreamSampler, rng_for

labels = np.repeat(np.arange(47), 36)
print(BatchSampler(64, (2, 10)).draw(labels, rng_for("paper", "dtd", "low", 3)).tolist())
print(StreamSampler("dirichlet", xi=0.01).draw(labels, rng_for("paper", "dtd", "medium", 3)).tolist())
"""


def test_the_four_words_alone_decide_the_draws_in_any_process():
    first, second = (
        subprocess.run(
            [sys.executable, "-c", DRAW],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},  # a seed made with hash() would differ
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    )
    assert first == second
    assert len(first) > 2000


def test_seeds_are_the_same_on_every_machine():  # random_raw is fixed for all releases of numpy
    assert rng_for("paper", "dtd", "low", 0).bit_generator.random_raw() == 2543629647259906142


def test_every_word_counts_and_words_do_not_run_together():
    words = [("a", "b", "c", 0), ("a", "b", "c", 1), ("ab", "", "c", 0), ("a", "bc", "", 0), ("a", "b", "d", 0)]
    assert len({rng_for(*w).random() for w in words}) == len(words)
