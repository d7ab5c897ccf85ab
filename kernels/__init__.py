"""moebius.kernels: functional operators, each in several forms of one contract. Here lives the routed-experts
operator: the contract (contract.py), the torch operators and their front door (experts_op.py), and the forms that
run: reference.py (readable, float64), cpu.py and triton_form/ (GPU). The CPU form gives each thread experts of its own
(by_expert.py), or goes over sorted rows in panels (panels.py); it calls the library's GEMMs (products.py) and has its
work on rows in C (native/). A file here knows tensors
and nothing of capture, lowering or models; it imports nothing of ours but its neighbours."""
from moebius.kernels.activations import ACTIVATIONS
from moebius.kernels.calibrate import PrecisionReport, chosen_precisions, precision_report
from moebius.kernels.contract import saved_elements
from moebius.kernels.errors import BackendUnavailableError, ExpertsInputError, ExpertsTypeError
from moebius.kernels.experts_op import experts, experts_rows
from moebius.kernels.precision import Budget, Precision
from moebius.kernels.rounding import round_routing, round_tokens

__all__ = [
    "ACTIVATIONS", "BackendUnavailableError", "Budget", "ExpertsInputError", "ExpertsTypeError", "Precision",
    "PrecisionReport", "chosen_precisions", "experts", "experts_rows", "precision_report", "round_routing",
    "round_tokens", "saved_elements",
]
