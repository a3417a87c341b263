"""Plans as text, for ``treeattn topology``."""

from __future__ import annotations

from treeattn.planning.plan import Message, Plan, Round
from treeattn.planning.topology import group_ranks

__all__ = ["draw"]

SHOWN = 12
"""Messages of a round that are spelled out; the rest are counted."""


def draw(plan: Plan) -> str:
    """Draw the hosts with their ranks, leaders first, and then the rounds with their messages.

    Where the head rows are cut into pieces, the messages are those of the first.
    """
    more = f" (the first of {plan.pieces} pieces, which are alike)" if plan.pieces > 1 else ""
    return "\n".join([str(plan), "", *_draw_hosts(plan), "", *_draw_rounds(plan, more)])


def _draw_hosts(plan: Plan) -> list[str]:
    lines = []
    for group in group_ranks(plan.hosts):
        leader = _leader(plan, group)
        members = [rank for rank in group if rank != leader]
        lines.append(f"{plan.hosts[group[0]]}")
        lines.append(f"└─ rank {leader}{' (root)' if leader == plan.root else ''}")
        lines += [f"   {'└─' if rank == members[-1] else '├─'} rank {rank}" for rank in members]
    return lines


def _leader(plan: Plan, group: tuple[int, ...]) -> int:
    """Give the root, or else who speaks for the host when it comes to the first piece."""
    if plan.root in group:
        return int(plan.root or 0)
    sent = [m.source for each in plan.rounds for m in each.messages if m.piece == 0 and plan.crosses(m)]
    return next((rank for rank in sent if rank in group), group[0])


def _draw_rounds(plan: Plan, more: str) -> list[str]:
    return [f"round {number}  {_draw_round(each, plan)}{more}" for number, each in enumerate(plan.rounds, 1)]


def _draw_round(each: Round, plan: Plan) -> str:
    crosses = any(plan.crosses(message) for message in each.messages)
    where = "inside racks " if each.level == "rack" else "between hosts" if crosses else "inside hosts "
    shown = _pairs([message for message in each.messages if message.piece == 0])
    more = f" ... {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{where}  {each.action:<11}  {'  '.join(shown[:SHOWN])}{more}"


def _pairs(messages: list[Message]) -> list[str]:
    """Write each message as an arrow, and two that cross each other as one."""
    sent = {(message.source, message.dest): message.slots for message in messages}
    arrows = []
    for (source, dest), slots in sent.items():
        back = sent.get((dest, source))
        if back == slots and dest < source:
            continue  # drawn with its counterpart
        arrow = f"{source}↔{dest}" if back == slots else f"{source}→{dest}"
        arrows.append(f"{arrow}×{slots}" if slots > 1 else arrow)
    return arrows
