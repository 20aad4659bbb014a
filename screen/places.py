"""Where each pane goes, on a screen of any size.

The problem. 80 × 24 characters have room for two panes, 200 × 50 for all of them.

What this file keeps. Panes never overlap nor leave the screen, and a pane without enough room to
say something is left out as a whole. On a small screen the panes of `LOWER` take turns in one
place; `v` leads from each to the next.

Where next: `widgets.py`, what stands in these places.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Region

# Of charts
STACKS = {"charts": ("rate", "batch", "ttft"), "lesson": ("cost",)}
# The panes that take turns if room is short
LOWER = ("timeline", "streams", "step", *STACKS, "clients")


def arrange_wide(width: int, body: int, slots: int, lower: str, door: bool) -> dict[str, Region]:
    """All panes side by side: at the left slots, timeline and answers, at the right charts and the
    step. `body`: lines between the first one and the prompt box."""
    rows = min(slots, max(4, (body - 15) // 2))
    top = 2 * rows + 5
    right = max(40, width * 3 // 8)
    left = width - right - 2
    tall = body - top
    charts = lower if lower in STACKS else "charts"
    places = stack(Region(left + 2, 1, right, top), STACKS[charts])
    places["slots"] = Region(0, 1, left, rows + 3)
    places["timeline"] = Region(0, rows + 4, left, rows + 2)
    if door:
        tall -= tall // 2
        places["clients"] = Region(0, 1 + top + tall, width, body - top - tall)
    places["streams"] = Region(0, 1 + top, left, tall)
    under = tall - 14 if tall >= 22 else 0  # lines for one more chart under the step
    places["step"] = Region(left + 2, 1 + top, right, tall - under)
    if under:
        chart = "requests" if charts == "lesson" else "cost"
        rest = Region(left + 2, 1 + top + tall - under, right, under)
        places |= stack(rest, (chart,))
    return places


def arrange(
    width: int, height: int, slots: int, lower: str, door: bool = False
) -> dict[str, Region]:
    """Where each pane goes. A pane that is not named has no room, and is not shown. `lower` is one
    of `LOWER`."""
    if is_small(width, height):
        return {"small": Region(0, 0, width, height)}
    places = {"status": Region(0, 0, width, 1)} | bottom(width, height)
    body = height - 3
    if is_wide(width, height):
        return places | arrange_wide(width, body, slots, lower, door)

    rows = min(slots, (body - 5) // 2)
    places["slots"] = Region(0, 1, width, rows + 3)
    y = rows + 4
    tall = body - rows - 3
    # There is room for the timeline and another pane
    if tall >= rows + (5 if lower == "timeline" else 8):
        places["timeline"] = Region(0, y, width, rows + 2)
        y += rows + 2
        tall -= rows + 2
        lower = "streams" if lower == "timeline" else lower
    below = Region(0, y, width, tall)
    return places | (stack(below, STACKS[lower]) if lower in STACKS else {lower: below})


def arrange_talk(width: int, height: int, slots: int) -> dict[str, Region]:
    """Where each pane goes while a conversation is open. A strip of the engine stands over the
    conversation; on a wide screen, beside the conversation."""
    if is_small(width, height):
        return {"small": Region(0, 0, width, height)}
    places = {"status": Region(0, 0, width, 1)} | bottom(width, height)
    body = height - 3
    rows = min(slots, 2 if height < 30 else 4)
    strip = Region(0, 1, width, rows + 3)
    talk = Region(0, rows + 4, width, body - rows - 3)
    names = ("slots", "timeline")
    if width >= 150:
        left = width * 5 // 8
        talk = Region(0, 1, left, body)
        strip = Region(left + 2, 1, width - left - 2, body)
        names += ("rate", "ttft")
    return places | {"talk": talk} | stack(strip, names)


def bottom(width: int, height: int) -> dict[str, Region]:
    """The prompt box, the settings beside it, and the footer."""
    beside = max(33, width // 3)
    return {
        "mark": Region(0, height - 2, 3, 1),
        "prompt": Region(3, height - 2, width - beside - 3, 1),
        "settings": Region(width - beside, height - 2, beside, 1),
        "keys": Region(0, height - 1, width, 1),
    }


def arrange_loading(width: int, height: int) -> dict[str, Region]:
    """Where each pane goes while the model loads: prompts can be typed already."""
    if is_small(width, height):
        return {"loading": Region(0, 0, width, height)}
    return {"loading": Region(0, 0, width, height - 2)} | bottom(width, height)


def arrange_tour(width: int, height: int, slots: int, lower: str) -> dict[str, Region]:
    """Where each pane goes while the tour speaks: its strip stands in place of the prompt box, over
    the footer. Slots and timeline are in sight on any screen; on a small one, side by side."""
    if is_small(width, height):
        return {"small": Region(0, 0, width, height)}
    tall = 7 if width >= 80 else 9
    strip = height - 1 - tall
    rows = min(slots, strip - 4)
    # As ever, on a screen that ends with the strip's first line
    places = arrange(width, strip + 2, slots, lower)
    all_slots = "slots" in places and places["slots"].height == slots + 3
    if "timeline" in places and (all_slots or is_wide(width, strip + 2)):
        for name in ("mark", "prompt", "settings"):
            del places[name]
    else:
        left = (width + 6) // 2
        places = {
            "status": Region(0, 0, width, 1),
            "slots": Region(0, 1, left, rows + 3),
            "timeline": Region(left + 1, 1, width - left - 1, rows + 2),
        }
        below = Region(0, rows + 4, width, strip - rows - 4)
        if below.height >= 4:
            lower = "streams" if lower == "timeline" else lower
            places |= stack(below, STACKS[lower]) if lower in STACKS else {lower: below}
    places["tour"] = Region(0, strip, width, tall)
    places["keys"] = Region(0, height - 1, width, 1)
    return places


def is_small(width: int, height: int) -> bool:
    """Is there no room for anything?"""
    return width < 60 or height < 20


def is_wide(width: int, height: int) -> bool:
    """Is there room for slots, timeline, charts, answers and step side by side?"""
    return width >= 110 and height >= 34


def stack(place: Region, names: Sequence[str]) -> dict[str, Region]:
    """Charts, one above the other; side by side if there is no room for that. The last ones are
    left out first."""
    x, y, wide, tall = place
    out = {}
    if tall < 6 * len(names) and wide >= 72:
        each = (wide - 2 * (len(names) - 1)) // len(names)
        for i, name in enumerate(names):
            out[name] = Region(x + i * (each + 2), y, each, tall)
        return out
    names = names[: max(1, tall // 4)]
    for i, name in enumerate(names):
        top = i * tall // len(names)
        end = (i + 1) * tall // len(names)
        out[name] = Region(x, y + top, wide, end - top)
    return out
