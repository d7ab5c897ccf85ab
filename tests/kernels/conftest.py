"""Makes the helpers of this folder importable, whatever pytest's import mode is, and keeps Triton a compiler here: what
runs in its interpreter runs in a process of its own (triton_worker.py)."""
import os
import sys
from pathlib import Path

import torch

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(min(2, torch.get_num_threads()))
