"""A small Mixtral that generates with a captured forward: the same tokens as plain PyTorch, each new one a hit.

``generate`` of transformers stays as it is; it calls the model, whose ``forward`` is captured. The prompt is one
capture, the first new token another, and what changes from token to token (the position, the length of the cache) is a
symbol or a number of the graph from the next one on.

    python examples/generate.py                       # greedy, with the cache that grows
    python examples/generate.py --cache static --batch 4 --sample
    python examples/generate.py --whole               # capture(model.generate) itself, timed
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moebius import capture, stats


def make_model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
        experts_implementation="eager",  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def timed(generate: Callable[..., Any], prompt: torch.Tensor, options: dict[str, Any]) -> tuple[list[list[int]], float]:
    """The tokens, and seconds for one more generation from the same seed: nothing is captured in that one."""
    torch.manual_seed(1)
    generate(prompt, **options)
    torch.manual_seed(1)
    started = time.perf_counter()
    return generate(prompt, **options).tolist(), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="new ones")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--sample", action="store_true", help="draw tokens; without, the likeliest one")
    parser.add_argument("--whole", action="store_true", help="capture generate itself")
    given = parser.parse_args()
    prompt = torch.randint(1, 256, (given.batch, 8), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {
        "max_new_tokens": given.tokens, "min_new_tokens": given.tokens, "do_sample": given.sample,
        "attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "disable_compile": True,
    }  # fmt: skip
    if given.cache == "static":
        options["cache_implementation"] = "static"

    plain, plain_seconds = timed(make_model().generate, prompt, options)
    model = make_model()
    if given.whole:
        captured = generate = capture(model.generate)
    else:
        captured = capture(model.forward)
        model.forward, generate = captured, model.generate
    started = time.perf_counter()
    torch.manual_seed(1)
    generate(prompt, **options)
    first = time.perf_counter() - started
    misses = stats(captured).misses
    tokens, seconds = timed(generate, prompt, options)
    said = {
        "equal": tokens == plain, "tokens": given.tokens, "plain_s": round(plain_seconds, 3),
        "captured_s": round(seconds, 3), "first_s": round(first, 2), "misses": misses,
        "later_misses": stats(captured).misses - misses, "breaks": stats(captured).breaks,
    }  # fmt: skip
    print(json.dumps(said))


if __name__ == "__main__":
    main()
