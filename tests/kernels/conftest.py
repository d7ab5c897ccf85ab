"""Makes the helpers of this folder importable, whatever pytest's import mode is."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(min(2, torch.get_num_threads()))
