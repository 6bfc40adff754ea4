"""The parts of `benchmarks/paper.py`: the tables of docs/paper.md."""
