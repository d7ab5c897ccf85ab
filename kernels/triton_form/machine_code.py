"""What the machine code says of the loop that multiplies matrices: how its operands arrive and what an iteration waits
for. A kernel without spills, on tensor cores, is still slow where its loop reads memory and then waits for it.

The loop is found in the control flow: blocks between labels and branches, natural loops (Aho et al. 2006, section
9.6.6), and of those the innermost with matrix instructions in it. Loops within it, which only wait, are left out.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MATRIX = re.compile(r"HGMMA|QGMMA|UTC\w*MMA|HMMA|v_mfma\w*|v_wmma\w*")
JUMPS = ("BRA", "JMP", "s_branch", "s_cbranch")
ENDS = ("EXIT", "RET", "s_endpgm", "s_setpc_b64")


@dataclass(frozen=True)
class MainLoop:
    """Instructions of one iteration; of the loops together where a kernel has several.

    tma: tiles copied by descriptor. copies: asynchronous copies into shared memory, 16 bytes a thread or fewer.
    plain: loads into registers; plain_bytes: what a thread reads by them. barriers: of the whole block. spills: loads
    and stores of local memory. copies_left: groups of asynchronous copies that may still be under way when an
    iteration starts to multiply; products_left: groups of wgmma that may be when it goes on to the next. None: it does
    not wait for any.
    """

    matrix: int
    tma: int
    copies: int
    plain: int
    plain_bytes: int
    barriers: int
    spills: int
    copies_left: int | None
    products_left: int | None

    @property
    def loads(self) -> str:
        """How memory is read, in words."""
        kinds = ((self.tma, "TMA"), (self.copies, "async"), (self.plain, "plain"))
        return ", ".join(f"{count} {kind}" for count, kind in kinds if count)

    @property
    def under_way(self) -> str:
        """What its waits leave under way, in words."""
        left = ((self.copies_left, "copies"), (self.products_left, "products"))
        return ", ".join(f"{count} {what}" for count, what in left if count is not None)


@dataclass
class Block:
    """Instructions without a label or branch among them: (operation, the rest of the line)."""

    code: list[tuple[str, str]]
    follows: list[int]


def instructions(text: str) -> Iterator[tuple[str | None, bool, str, str]]:
    """(label, None, ...) or (None, predicated, operation, operands) of nvdisasm's or LLVM's listing."""
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).split("//")[0].split(";")[0].strip()
        label = re.match(r"(\.L\w+):", line)
        if label:
            yield label[1], False, "", ""
            continue
        found = re.match(r"(@!?U?P\w+\s+)?([A-Za-z_][\w.]*)\s*(.*)", line)
        if found and not line.startswith("."):
            yield None, bool(found[1]), found[2], found[3]


def blocks_of(text: str) -> list[Block]:
    """Basic blocks in the order of the listing."""
    blocks, labels, jumps = [Block([], [])], {}, []
    open_ended = True  # whether the last block falls through into the next

    def begin() -> None:
        nonlocal open_ended
        if open_ended:
            blocks[-1].follows.append(len(blocks))
        blocks.append(Block([], []))
        open_ended = True

    for label, predicated, operation, operands in instructions(text):
        if label is not None:
            begin()
            labels[label] = len(blocks) - 1
            continue
        blocks[-1].code.append((operation, operands))
        if operation.startswith(JUMPS):
            target = re.search(r"\.L\w+", operands)
            if target:
                jumps.append((len(blocks) - 1, target[0]))
            # "BRA.U UP0, target" and s_cbranch depend on an operand
            open_ended = operation not in ("BRA", "JMP", "s_branch") or predicated or "," in operands
            begin()
        elif operation.startswith(ENDS):
            open_ended = predicated
            begin()
    for source, target_label in jumps:
        if target_label in labels:
            blocks[source].follows.append(labels[target_label])
    return blocks


def natural_loops(blocks: list[Block]) -> list[set[int]]:
    """The bodies of the loops, one for each head."""
    reached, todo = {0}, [0]
    before: dict[int, list[int]] = {0: []}
    while todo:
        number = todo.pop()
        for follower in blocks[number].follows:
            before.setdefault(follower, []).append(number)
            if follower not in reached:
                reached.add(follower)
                todo.append(follower)
    dominators = {number: reached for number in reached} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for number in sorted(reached - {0}):
            new = {number} | set.intersection(*(dominators[each] for each in before[number]))
            if new != dominators[number]:
                dominators[number], changed = new, True
    loops: dict[int, set[int]] = {}
    for number in sorted(reached):
        for head in dominators[number].intersection(blocks[number].follows):
            body, todo = loops.setdefault(head, {head}), [number]
            while todo:
                each = todo.pop()
                if each not in body:
                    body.add(each)
                    todo += before[each]
    return list(loops.values())


def width_of(operation: str) -> int:
    """Bytes a thread of a load, by its suffix (NVIDIA) or its name (AMD)."""
    found = re.search(r"\.U?(\d+)\b|dwordx(\d)|\.[US](8|16)\b", operation)
    if found and found[2]:
        return 4 * int(found[2])
    return int(found[1] or found[3]) // 8 if found else 2 if "short" in operation else 4


def main_loop(text: str) -> MainLoop | None:
    """Of a kernel's listing, nvdisasm -c or LLVM's assembly; None where no loop multiplies matrices."""
    blocks = blocks_of(text)
    loops = natural_loops(blocks)

    def multiplies(body: set[int]) -> bool:
        return any(MATRIX.match(operation) for each in body for operation, _ in blocks[each].code)

    mains = [body for body in loops if multiplies(body)]
    mains = [body for body in mains if not any(other < body for other in mains)]
    if not mains:
        return None
    within = set().union(*(body for body in loops if not multiplies(body)))
    code = [entry for body in mains for each in sorted(body - within) for entry in blocks[each].code]

    def named(*names: str) -> list[tuple[str, str]]:
        return [(operation, operands) for operation, operands in code if re.match("|".join(names), operation)]

    def least(found: list[tuple[str, str]]) -> int | None:
        counts = [int(number[1], 16) for _, operands in found if (number := re.search(r",\s*(0x[0-9a-f]+)", operands))]
        return min(counts) if counts else None

    # LDGSTS copies to shared memory without registers; on AMD a load with "lds" among its operands does
    loads = named(r"LDG\b", r"LD\b", "global_load", "buffer_load", "flat_load")
    direct = [each for each in loads if re.search(r"\blds\b", each[1])]
    plain = [each for each in loads if each not in direct]
    return MainLoop(
        matrix=sum(bool(MATRIX.match(operation)) for operation, _ in code),
        tma=len(named("UTMALDG", "UBLKCP")),
        copies=len(named("LDGSTS")) + len(direct),
        plain=len(plain),
        plain_bytes=sum(width_of(operation) for operation, _ in plain),
        barriers=len(named(r"BAR\.", "s_barrier")),
        spills=len(named(r"LDL\b", r"STL\b", "scratch_")),
        copies_left=least(named(r"DEPBAR")),
        products_left=least(named(r"WARPGROUP\.DEPBAR")),
    )
