"""``python -m zoo``: measure families, one process each, and write docs/zoo.md.

    python -m zoo                          # all families, moebius only; what torch.compile did is taken from earlier
    python -m zoo --peer                   # torch.compile too, where no result of it is kept
    python -m zoo mixtral gpt_oss          # these families; the page is written of all results there are
    python -m zoo --resume                 # only the families that have no result yet
    python -m zoo --experts grouped_mm     # with another implementation of experts, to a page of its own
    python -m zoo --memory                 # the peaks of memory alone, in the results that there are

Results are kept in out/zoo, one JSON file a family, under the versions they were made with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from . import measure, page, tiny

ROOT = Path(__file__).resolve().parent.parent.parent
TIME_LIMIT = 600.0  # seconds a family and contender


def child(connection: Any, what: str, family: str, experts: str, log: Path) -> None:
    with log.open("w") as file:  # what libraries print, from C as well
        os.dup2(file.fileno(), 2)
    transformers.utils.logging.set_verbosity_error()
    connection.send(getattr(measure, what)(family, experts))


def in_process(what: str, family: str, experts: str, folder: Path) -> dict[str, Any]:
    """The result of ``measure.what(family, experts)``, of a process of its own; forked, so imports are paid once."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(send, what, family, experts, folder / f"{family}.{what}.log"))
    process.start()
    send.close()
    try:
        if not receive.poll(TIME_LIMIT):
            process.kill()
            return {"crash": f"not done after {TIME_LIMIT:.0f} s"}
        return receive.recv()
    except EOFError:
        process.join()
        return {"crash": f"the process ended with exit status {process.exitcode}"}
    finally:
        process.join()


def versions() -> str:
    return f"CPython {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"


def whole(result: dict[str, Any]) -> bool:
    """Whether the family ran with the default backend."""
    return "peak_bytes" in result.get("ours", {}).get("moebius", {})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="names of model folders of transformers; without any, all")
    parser.add_argument("--peer", action="store_true", help="measure torch.compile too, where no result of it is kept")
    parser.add_argument("--resume", action="store_true", help="keep results of moebius that are there")
    parser.add_argument("--memory", action="store_true", help="measure memory alone, in results that are there")
    parser.add_argument("--experts", default="eager", help="experts_implementation, as grouped_mm, the default there")
    parser.add_argument("--results", type=Path, help="default: out/zoo, or out/zoo-EXPERTS")
    parser.add_argument("--page", type=Path, help="default: docs/zoo.md, or docs/zoo-EXPERTS.md")
    args = parser.parse_args()
    name = "zoo" if args.experts == "eager" else f"zoo-{args.experts}"
    args.results, args.page = args.results or ROOT / "out" / name, args.page or ROOT / "docs" / f"{name}.md"
    known = tiny.moe_families()
    unknown = set(args.families) - set(known)
    if unknown:
        parser.error(f"not MoE families of transformers {transformers.__version__}: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    args.results.mkdir(parents=True, exist_ok=True)
    for family in args.families or known:
        file = args.results / f"{family}.json"
        result = json.loads(file.read_text()) if file.exists() else {}
        if result.get("versions") != versions():
            result = {"versions": versions()}
        start = time.monotonic()
        if args.memory:
            found = in_process("memory", family, args.experts, args.results) if whole(result) else {}
            for name in found.keys() & {"plain", "moebius"}:
                result["ours"][name]["peak_bytes"] = found[name]
            file.write_text(json.dumps(result, indent=1))
            print(f"{family:24} {found}", flush=True)
            continue
        if "ours" not in result or not args.resume:
            result["ours"] = in_process("ours", family, args.experts, args.results)
            result["measured"] = datetime.datetime.now(datetime.UTC).date().isoformat()
        if args.peer and "peer" not in result:
            result["peer"] = in_process("peer", family, args.experts, args.results)
        file.write_text(json.dumps(result, indent=1))
        print(f"{page.summary(family, result)}  {time.monotonic() - start:.0f} s", flush=True)
    results = {
        family: json.loads(path.read_text()) for family in known if (path := args.results / f"{family}.json").exists()
    }
    args.page.write_text(page.write(results, len(known), versions(), args.experts))
    print(f"{args.page}: {len(results)} of {len(known)} families")


if __name__ == "__main__":
    main()
