"""Private names of torch's: what optimizers ask of their lists of tensors."""

from torch.utils._foreach_utils import _has_foreach_support as has_foreach_support

__all__ = ["has_foreach_support"]
