"""Plans as text, for ``treeattn topology``."""

from __future__ import annotations

from treeattn.plan import Message, Plan, Round
from treeattn.topology import group_ranks

__all__ = ["draw"]

SHOWN = 12
"""Messages of a round that are spelled out; the rest are counted."""


def draw(plan: Plan) -> str:
    """Draw the hosts with their ranks, leaders first, and then the rounds with their messages."""
    return "\n".join([str(plan), "", *_draw_hosts(plan), "", *_draw_rounds(plan)])


def _draw_hosts(plan: Plan) -> list[str]:
    lines = []
    for group in group_ranks(plan.hosts):
        leader = plan.root if plan.root in group else group[0]
        members = [rank for rank in group if rank != leader]
        lines.append(f"{plan.hosts[group[0]]}")
        lines.append(f"└─ rank {leader}{' (root)' if leader == plan.root else ''}")
        lines += [f"   {'└─' if rank == members[-1] else '├─'} rank {rank}" for rank in members]
    return lines


def _draw_rounds(plan: Plan) -> list[str]:
    return [f"round {number}  {_draw_round(each, plan)}" for number, each in enumerate(plan.rounds, 1)]


def _draw_round(each: Round, plan: Plan) -> str:
    where = "between hosts" if any(plan.crosses(message) for message in each.messages) else "inside hosts "
    shown = _pairs(each.messages)
    more = f" ... {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{where}  {each.action:<11}  {'  '.join(shown[:SHOWN])}{more}"


def _pairs(messages: tuple[Message, ...]) -> list[str]:
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
