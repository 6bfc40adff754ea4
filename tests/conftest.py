"""Settings of the test run: draws that repeat, and one thread for torch, which small arrays only slow down."""

import torch
from hypothesis import settings

settings.register_profile("moontide", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("moontide")
torch.set_num_threads(1)
