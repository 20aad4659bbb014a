"""Compute the region of each pane for any screen size.

Panes never overlap, and a pane that would be too small to read is left out. A small screen shows
one of the panes in `LOWER` at a time; `v` switches to the next.
"""

from __future__ import annotations

from textual.geometry import Region

# Panes that are shown together
STACKS = {
    "charts": ("rate", "batch", "ttft"),
    "lesson": ("batching",),
    "over a talk": ("slots", "timeline"),
    "beside a talk": ("slots", "timeline", "rate", "ttft"),
}
CHARTS = ("charts", "lesson")
# A small screen shows one of these at a time
LOWER = ("timeline", "streams", "step", *CHARTS, "clients")


def arrange(
    width: int, height: int, slots: int, lower: str, server: bool = False
) -> dict[str, Region]:
    """Return the region of each pane that fits. `lower` is one of `LOWER`."""
    places = frame(width, height)
    body = height - 3
    if is_wide(width, height):
        return places | arrange_wide(width, body, slots, lower, server)
    rows = min(slots, (body - 5) // 2)
    places["slots"] = Region(0, 1, width, rows + 3)
    y = rows + 4
    tall = body - rows - 3
    # If there is room, show the timeline and one more pane
    if tall >= rows + (5 if lower == "timeline" else 8):
        places["timeline"] = Region(0, y, width, rows + 2)
        y += rows + 2
        tall -= rows + 2
        lower = "streams" if lower == "timeline" else lower
    return places | stack(Region(0, y, width, tall), lower)


def arrange_wide(width: int, body: int, slots: int, lower: str, server: bool) -> dict[str, Region]:
    """Place all panes: slots, timeline and answers on the left, charts and the step on the right.
    `body`: number of lines between the status line and the prompt box."""
    rows = min(slots, max(4, (body - 15) // 2))
    top = 2 * rows + 5
    wide = max(40, width * 3 // 8)
    left = width - wide - 2
    right = left + 2
    y = 1 + top
    tall = body - top
    charts = lower if lower in CHARTS else "charts"
    places = stack(Region(right, 1, wide, top), charts)
    places["slots"] = Region(0, 1, left, rows + 3)
    places["timeline"] = Region(0, rows + 4, left, rows + 2)
    if server:
        calls = tall // 2
        tall -= calls
        places["clients"] = Region(0, y + tall, width, calls)
    places["streams"] = Region(0, y, left, tall)
    if tall >= 22:  # one more chart under the step
        under = "requests" if charts == "lesson" else "batching"
        places[under] = Region(right, y + 14, wide, tall - 14)
        tall = 14
    places["step"] = Region(right, y, wide, tall)
    return places


def arrange_chat(width: int, height: int, slots: int) -> dict[str, Region]:
    """Place the panes while a conversation is open.

    Some engine panes are above it, or next to it on a wide screen.
    """
    places = frame(width, height)
    body = height - 3
    if width >= 150:
        left = width * 5 // 8
        places["talk"] = Region(0, 1, left, body)
        return places | stack(Region(left + 2, 1, width - left - 2, body), "beside a talk")
    tall = 3 + min(slots, 2 if height < 30 else 4)
    places["talk"] = Region(0, 1 + tall, width, body - tall)
    return places | stack(Region(0, 1, width, tall), "over a talk")


def arrange_loading(width: int, height: int) -> dict[str, Region]:
    """Place the panes while the model loads. Prompts can be typed already."""
    places = frame(width, height)
    del places["status"]
    return places | {"loading": Region(0, 0, width, height - 2)}


def arrange_strip(width: int, height: int, slots: int, lower: str) -> dict[str, Region]:
    """Place the panes while a page has a strip in place of the prompt box.

    Slots and timeline are always visible, side by side on a small screen.
    """
    tall = 8 if width >= 80 else 9
    y = height - 1 - tall
    # The usual layout, on a screen that ends where the strip begins
    places = arrange(width, y + 2, slots, lower)
    has_all = places["slots"].height == slots + 3 or is_wide(width, y + 2)
    if is_small(width, y + 2) or not has_all or "timeline" not in places:
        rows = min(slots, y - 4)
        left = (width + 6) // 2
        places = {
            "status": Region(0, 0, width, 1),
            "slots": Region(0, 1, left, rows + 3),
            "timeline": Region(left + 1, 1, width - left - 1, rows + 2),
        }
        if y - rows - 4 >= 3:
            lower = "streams" if lower == "timeline" else lower
            places |= stack(Region(0, rows + 4, width, y - rows - 4), lower)
    for name in ("mark", "prompt", "settings"):
        places.pop(name, None)
    places["strip"] = Region(0, y, width, tall)
    places["keys"] = Region(0, height - 1, width, 1)
    return places


def frame(width: int, height: int) -> dict[str, Region]:
    """Return the regions of the status line, the prompt box, the settings and the footer."""
    y = height - 2
    beside = max(33, width // 3)
    return {
        "status": Region(0, 0, width, 1),
        "mark": Region(0, y, 3, 1),
        "prompt": Region(3, y, width - beside - 3, 1),
        "settings": Region(width - beside, y, beside, 1),
        "keys": Region(0, y + 1, width, 1),
    }


def is_small(width: int, height: int) -> bool:
    """True if the screen is too small to show anything useful."""
    return width < 60 or height < 20


def is_wide(width: int, height: int) -> bool:
    """True if all panes fit at once."""
    return width >= 110 and height >= 34


def stack(place: Region, name: str) -> dict[str, Region]:
    """Place one pane or a stack of panes: vertically, or side by side if there are few lines.

    Panes that do not fit are left out, the last ones first.
    """
    names = STACKS.get(name, (name,))
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
