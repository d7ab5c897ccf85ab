"""Makes the helpers of this folder importable, whatever pytest's import mode is, and keeps Triton a compiler here: what
runs in its interpreter runs in a process of its own (triton_worker.py).

The kernels need torch, and Triton on a GPU, and no other package: on a machine that reaches no package index these
tests run in a checkout that is built in place and not installed, those that want another package are skipped."""
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import torch

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(min(2, torch.get_num_threads()))

if importlib.util.find_spec("moebius") is None:
    # a package of links, which the processes that tests start find too; moebius.kernels imports nothing from above
    FOLDER = tempfile.TemporaryDirectory(prefix="moebius-")
    links = Path(FOLDER.name) / "moebius"
    links.mkdir()
    (links / "kernels").symlink_to(Path(__file__).parents[2] / "kernels")
    sys.path.insert(0, FOLDER.name)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER.name, os.environ.get("PYTHONPATH"))))

if importlib.util.find_spec("hypothesis") is None:
    import without_hypothesis

    without_hypothesis.install()
