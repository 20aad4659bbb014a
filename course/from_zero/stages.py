"""The stages: what is blank, what each function must do, and three hints for each.

This file is not a program: `start.py` writes the tasks into the blank book, and `check.py` checks
what was written and gives hints. Each task says what a function must do in a *first* engine. Ours
does more (draft tokens, shared prefixes, grammars, what a GPU needs), but all of that is switched
off in the blank book until you want it.

Stages 1 to 8 are functions of the engine's own files. Stages 9 to 12 have chapters of their own, in
`reference/`, which no engine imports.
"""

from pathlib import Path
from typing import NamedTuple

from course.overlay import module_name, our_file


class Task(NamedTuple):
    """A function for the student to write."""

    name: str  # chapter and function: "kv.Window.write"
    does: str  # text in the blank book, in place of the body
    hints: tuple[str, ...]  # the last of three is nearly the answer; a handout has none

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def chapter(self) -> str:
        return self.name.partition(".")[0]

    @property
    def reference(self) -> Path:
        """The file that contains our function."""
        return our_file(module_name(self.chapter))


class Stage(NamedTuple):
    number: int
    name: str
    minutes: int
    runs: str  # what works after it
    tasks: tuple[Task, ...]

    @property
    def tests(self) -> Path:
        (file,) = Path(__file__).parent.glob(f"test_{self.number}_*.py")
        return file


STAGES = (
    Stage(
        1,
        "one token says something",
        60,
        "a prompt goes in, and the next token comes out",
        (
            Task(
                "llama.attention",
                """Compare each query with the keys, add the mask, make weights of the scores, and
                add up the values by weight. Leave `kind.cap` aside: the demo model has none. `q`
                holds the tokens of B sequences one after the other, L of each.""",
                (
                    "Bring q into the shape (B, H, L, Dh) first. Then the last two axes are a matrix "
                    "for each sequence and head, and `@` multiplies all of them at once.",
                    "Query heads 0 .. G-1 belong to key head 0, the next G to key head 1. As "
                    "(B, Hkv, G * L, Dh) the queries are next to the keys (B, Hkv, T, Dh) of their "
                    "own head. The scores, as (B, H, L, T), take the mask (B, 1, L, T).",
                    """q = q.reshape(B, L, H, Dh).swapaxes(1, 2).reshape(B, Hkv, -1, Dh)
scores = q @ k.swapaxes(-1, -2)              # (B, Hkv, G * L, T)
scores = scores.reshape(B, H, L, T) * ... + mask
weights = softmax(scores)                    # then as (B, Hkv, G * L, T), times v
sums as (B, H, L, Dh), axes 1 and 2 back, and at last (B * L, H * Dh)""",
                ),
            ),
            Task(
                "llama.heads",
                """`layer.qkv` is one product for all three: a row for each token, in which the heads of
                queries, keys and values follow each other. `layer.qk_norm` and `rope` take and
                return (N, heads, Dh), queries and keys together. Which of the three needs its position,
                and which does not?""",
                (
                    "`layer.heads` has H, Hkv and Dh. Reshape to (N, heads, Dh) before you cut.",
                    "`mx.split(x, [a, b], axis=1)` cuts before a and before b.",
                    """qkv = layer.qkv(x).reshape(-1, H + 2 * Hkv, Dh)
q, k, v = mx.split(qkv, [..., ...], axis=1)
qk = rope(layer.qk_norm(q and k, concatenated along axis 1))
and cut qk into q and k again""",
                ),
            ),
            Task(
                "llama.forward",
                """Look up the tokens (`model.table.embed`), let them run through all layers
                (`model.layers`), and return the states of those in `logits_at` (after `model.norm`). The
                docstring names what a layer calls. For each kind in `model.kinds`, `rope_at(kind, positions)`
                is its RoPE, and `ATTENTION[model.attention](kind, model.config.H, windows)` the operation
                that `attend` wants; a layer uses those with index `layer.kind`.""",
                (
                    "A layer adds twice to x: what attention found, and what the MLP makes of it. "
                    "Before each of them comes a norm, and what is added goes to the x before the norm.",
                    "Positions: those of all windows, concatenated. Before the loop, make two lists, `ropes` "
                    "and `operations`, with an entry for each kind; a layer indexes them by `layer.kind`. "
                    "`only(x, logits_at)` keeps the rows that yield a token: once, before the last norm, is enough.",
                    """x = model.table.embed(ids)
for layer in model.layers:
    q, k, v = heads(layer, layer.attn_norm(x), ropes[layer.kind])
    x = x + layer.out(attend(layer, q, k, v, windows, operations[layer.kind]))
    x = x + layer.mlp(...)
return model.norm(only(...))""",
                ),
            ),
        ),
    ),
    Stage(
        2,
        "norms and rotation",
        45,
        "the same token, and a whole answer; of a layer's operations only products and softmax are still ours",
        (
            Task(
                "ops.rms_norm",
                "Return a function of x. The mean is taken over the last axis, for each row by itself.",
                (
                    "A function within the function keeps `weight` and `eps`.",
                    "`x.square().mean(axis=-1, keepdims=True)` has a number for each row. eps is "
                    "added under the root.",
                    """def norm(x):
    mean = mx.mean(x * x, axis=-1, keepdims=True)
    return x * mx.rsqrt(... + eps) * ...
return norm""",
                ),
            ),
            Task(
                "ops.swiglu",
                "The first half of the last axis is the gate, the second half is up.",
                (
                    "`mx.split(gate_up, 2, axis=-1)`",
                    "x / (1 + e^-x) is x times `mx.sigmoid(x)`.",
                    "gate, up = mx.split(gate_up, 2, axis=-1); then gate * sigmoid(gate) * ...",
                ),
            ),
            Task(
                "rope.rotate",
                """Number i and number i + Dh/2 of a head are a point (a, b). Turn each. `cos` and
                `sin` hold a number for each of the Dh places already, and `sin` has its minus in the
                first half.""",
                (
                    "a is in the first half of the last axis, b in the second. The result has the "
                    "same order.",
                    "The first half becomes a cos - b sin, the second b cos + a sin. As a whole: x times "
                    "cos, and x with its halves exchanged, times sin.",
                    """a, b = mx.split(x, 2, axis=-1)
other = mx.concatenate([..., ...], axis=-1)
return x * cos + other * sin""",
                ),
            ),
            Task(
                "rope.rope_angles",
                """Plane i of a token at position p is turned by the angle p * kind.frequencies[i].
                Return cos and sin for both numbers of each plane (`both_of_a_plane`), with an axis
                of 1 for the heads. Leave `gain` aside.""",
                (
                    "The angles have the shape (N, 1, Dh/2).",
                    "`positions[:, None, None]` times `kind.frequencies` has it.",
                    """angles = positions[:, None, None] * kind.frequencies
return both_of_a_plane(mx.cos(angles), ...)""",
                ),
            ),
        ),
    ),
    Stage(
        3,
        "the slab",
        60,
        "the same tokens, and each step computes one",
        (
            Task(
                "llama.seen",
                """Which rows does each token see? The row of its own position, and all before it;
                with a `span`, the last `span` of these. `positions` are the tokens' positions,
                (B, 1, L, 1).""",
                (
                    "Compare the numbers of all rows, `mx.arange(T)`, with each token's position.",
                    "Positions as (B, 1, L, 1) and rows as (T,) give (B, 1, L, T).",
                    """seen = mx.arange(T) <= ...
with a span: seen & (mx.arange(T) > positions - ...)""",
                ),
            ),
            Task(
                "kv.Window.write",
                """Write the new keys and values of layer `layer` into `self.slab.arrays[layer]`:
                those of sequence i into slot `self.slots[i]`, from row `self.starts[i]` on, L rows
                in each head. The array has the shape (slots, 2 Hkv, S + 1, Dh): first the heads of
                the keys, then those of the values. `self.slab.narrowed` gives numbers the slab's
                dtype. A loop over the sequences is right. (It is slow for many: `_decoding_rows`,
                which is not blank, shows how one operation writes all.)""",
                (
                    "k is (B * L, Hkv, Dh): the first L rows are those of the first sequence.",
                    "A piece of L tokens is (L, 2 Hkv, Dh), and its place in the slab (2 Hkv, L, Dh).",
                    """new = self.slab.narrowed(mx.concatenate([k, v], axis=1))
for i in range(self.B):
    slot, start = ...
    piece = new[i * self.L : (i + 1) * self.L].swapaxes(0, 1)
    self.slab.arrays[layer][slot, :, start : start + self.L] = piece""",
                ),
            ),
            Task(
                "kv.Window.read",
                """The keys and values that a group reads: the first T rows of its slots, as views.""",
                (
                    "`group.slots` is a slice, and so the first index.",
                    "The axes are slots, heads, rows, numbers of a head.",
                    "mx.split(self.slab.arrays[layer][group.slots, :, : ...], 2, axis=1)",
                ),
            ),
            Task(
                "llama.attend",
                """First all windows write their part of k and v; then `operation.run` reads, with the
                layer and all of q. `layer.slab_index` is the layer's number in the slab.""",
                (
                    "`cut(x, sizes)` cuts along the tokens. A window has B * L of them.",
                    "All windows have written before the first of them reads: two statements, no "
                    "common loop.",
                    """for window, new_k, new_v in zip(windows, cut(k, sizes), cut(v, sizes)):
    window.write(layer.slab_index, new_k, new_v)
return ...""",
                ),
            ),
            Task(
                "llama.Formula.run",
                """Each group of each window reads its rows, and `of_group` takes its part of q. Return
                all sums, in the tokens' order. A window's groups are `window.groups`, and
                `self.masks` has their masks, for each window a list.""",
                (
                    "`cut(x, sizes)` cuts along the tokens, first for the windows, then for groups.",
                    "A group has `group.B * window.L` tokens.",
                    """for window, window_q, masks in zip(self.windows, cut(q, ...), self.masks):
    for group, group_q, mask in zip(window.groups, cut(window_q, ...), masks):
        keys, values = window.read(layer, group)
        sums.append(self.of_group(group_q, keys, values, mask))
return mx.concatenate(sums)""",
                ),
            ),
        ),
    ),
    Stage(
        4,
        "sampling",
        60,
        "answers with a temperature and a seed; the same seed says the same again",
        (
            Task(
                "token_choice.argmax",
                "For each row the largest number and its id, both (n, 1). On ties, the lowest id.",
                (
                    "`keepdims=True` keeps the axis of 1.",
                    "`x.max` is the number, `mx.argmax` the id.",
                    "return x.max(axis=-1, keepdims=True), mx.argmax(x, ..., ...)",
                ),
            ),
            Task(
                "token_choice.uniform",
                """A number above 0 and below 1 that depends only on `seed` and `index`: no
                generator, no state. Other seeds and other indices give other numbers, as if drawn
                at random.""",
                (
                    "Mix the two into one whole number, so that each bit of them reaches each bit of "
                    "the result; then divide.",
                    "Any good hash will do, `hashlib.blake2b` too, if a step may take some "
                    "microseconds more. Python's `hash` of a number is the number itself: no good.",
                    """data = f"{seed} {index}".encode()
x = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
return ((x >> 42) + 0.5) / 2**22       # 22 bits: below 1 as a float32, too""",
                ),
            ),
            Task(
                "token_choice.inverse_cdf",
                """Lay a row's weights end to end, and return the index of the weight at u times their sum.
                Never return a weight of 0. (u may be 1: then the last place with a weight.)""",
                (
                    "A running sum says where each place ends: `mx.cumsum`.",
                    "How many places end at the mark or before it? That is the index of the one we look "
                    "for.",
                    """sums = mx.cumsum(weights, axis=-1)
mark = u * sums[:, -1:]
place = (sums <= mark).sum(axis=-1, keepdims=True)
then no further than the last place with a weight: rounding may push the mark to the very end""",
                ),
            ),
            Task(
                "sampling.keep_first",
                """Here the tokens of each row are sorted, the likeliest first. True for the tokens that
                `filters.count` and `filters.mass` keep. `mass` may be None. A token's share is
                `spread.weights` over `spread.total`.""",
                (
                    "The count keeps the places below it.",
                    "The mass keeps a token if the tokens *before* it have less than that: so the first "
                    "is always kept. `mx.cumsum(..., inclusive=False)` adds up what comes before.",
                    """keep = mx.arange(k) < filters.count
if filters.mass is not None:
    above = mx.cumsum(spread.weights, axis=-1, inclusive=False)
    keep = keep & (above < ... * spread.total)""",
                ),
            ),
            Task(
                "sampling.draw",
                """Draw an id for each row: (n, 1). Each pick has settings of its own: a column of
                numbers for each setting. `Filters.from_settings(settings, spread)` makes columns of the filters.
                In the group "short list" the `SHORT_LIST` likeliest tokens are enough; in "long list"
                all, sorted; in any other group nothing is filtered by count or mass. The filters look
                at the weights at temperature 1, the draw at those of the pick's temperature. The
                noise of a pick is `uniform(pick.seed, pick.index)`.""",
                (
                    "`likeliest(spread.gap, k)` are the ids of the k likeliest, sorted, and "
                    "`spread.only(ids)` is the spread of these alone. What `inverse_cdf` finds is then a place "
                    "in `ids`: `gather(ids, places)`.",
                    "With a temperature t, a weight is `exp_minus(spread.gap / t)`. A weight that a filter "
                    "forbids is multiplied by False. Each of `filters.gaps` forbids larger gaps.",
                    """ids = None
if group in ("short list", "long list"):
    ids = likeliest(spread.gap, SHORT_LIST or V); spread = spread.only(ids)
weights = exp_minus(spread.gap / column of temperatures)
if ids is not None: weights = weights * keep_first(spread, filters)
for gap in filters.gaps: weights = weights * (spread.gap <= gap)
places = inverse_cdf(weights, column([uniform(...) for pick in picks]))
and back from places to ids""",
                ),
            ),
        ),
    ),
    Stage(
        5,
        "static batching",
        60,
        "several prompts at a time: a batch is admitted, and the next one when it has ended",
        (
            Task(
                "sched.Scheduler._admit",
                """Take requests out of the queue, in the order of `self.policy.next(self)`, as many as
                `self._admissible()` says. Each one gets a slot (`self.prefixes.choose_slot(request.prefix.trail,
                free)` chooses among the free ones, and says why), which goes into its `Admission`
                with the time and the policy's name, and is in `self.running` from now on.
                Return them.""",
                (
                    "`self.waiting` and `self.running` are by id. `self.free` is computed again "
                    "each time that you read it.",
                    "Take the requests out of the iterator before you change the queue: "
                    "`list(islice(self.policy.next(self), room))`.",
                    """for request in admitted:
    del self.waiting[request.id]
    slot, why = self.prefixes.choose_slot(request.prefix.trail, free)
    request.admission = Admission(now, ..., slot, why)
    self.running[...] = request; free.remove(...)""",
                ),
            ),
            Task(
                "runner.Runner._forward",
                """One forward pass for the whole batch, `step.batch`: first each of its prefills, with a
                window of its own; then all of its decodes, a slot and a row each, in one window. The newest
                token of each slot is on the device, in `self._newest` (slots,). Sampled are the last token
                of each prefill that `emits` one, and each token that decodes. `self.model.head` makes
                logits of their hidden states. Start the pass: `self._start([logits])`; if no token is sampled,
                `self._start(self.slab.written())`. Append what yields a token: its slots to `step.slots`, and
                its hidden states and logits, in the same order, to `step.hidden` and `step.logits`. (Leave
                `batch.passes`, `_gather` and `_padded` aside: they are for what is switched off.)""",
                (
                    "Count the tokens as you go: `logits_at` has indices among all tokens of the pass.",
                    "`Window(self.slab, [slot], [start], len(ids))` for a prefill; one window with the "
                    "slots and rows of all decodes, L=1, for these. No decodes, no window.",
                    """for prefill in step.batch.prefills:
    ids.append(mx.array(prefill.ids)); windows.append(...); count += len(prefill.ids)
    if prefill.emits: logits_at.append(count - 1); slots.append(prefill.slot)
if step.batch.decodes:
    decoding = [each.slot for each in step.batch.decodes]; rows = ...
    ids.append(self._newest[mx.array(decoding)]); windows.append(...)
    logits_at += range(count, count + len(decoding)); slots += decoding
hidden = forward(self.model, mx.concatenate(ids), windows, logits_at)
logits = self.model.head(hidden)
start it; step.slots += slots; step.hidden.append(hidden); step.logits.append(logits)""",
                ),
            ),
            Task(
                "runner.Runner._sample",
                """`step.logits` holds the logits, a row for each of `step.slots`; `rows` says, by
                slot, how its token is sampled: a list of one `SamplingRow`. Return an array (slots, 1): the
                token of each slot that yields one, and -1 for the others; the log probabilities, as
                `sample` returns them; and an empty dict. If no token is sampled: all -1, and the others
                empty. (Leave draft tokens and vectors aside.)""",
                (
                    "`sample(logits, rows, self._slot_biases)` returns tokens (n,) and log "
                    "probabilities. It wants the sampling rows in the order of the logits.",
                    "`mx.full((slots, 1), -1, mx.int32)`, and then `sampled[mx.array(slots), 0] = tokens`.",
                    """sampled = mx.full((self.slab.slots, 1), -1, mx.int32)
if not step.slots: return sampled, [], {}
ordered = [rows[slot][0] for slot in step.slots]
tokens, logprobs = sample(step.logits[0], ..., self._slot_biases)
sampled[...] = tokens; return sampled, logprobs, {}""",
                ),
            ),
        ),
    ),
    Stage(
        6,
        "slots, and continuous batching",
        60,
        "a slot that is free is taken at once: the timeline at the top of sched.py comes out",
        (
            Task(
                "request.Request.next_row",
                """The newest token that is planned has no row yet: it gets one when it goes in. Which
                one? The prompt has rows 0 to len - 1.""",
                (
                    "Work it out for a prompt of 3 tokens, of whose answer 1 is planned.",
                    "Rows 0, 1, 2 hold the prompt. The first token of the answer goes into row 3.",
                    "len(self.prompt) + self.planned - ...",
                ),
            ),
            Task(
                "sched.Scheduler.plan",
                """Admit; then all requests decode whose prompt is read (`phase`) and whose answer
                may still have a token that is not planned; those in prefill get chunks:
                `self._chunks(those that read, rest)` (`is_reading`). `rest` is what is left of the
                budget, but at least `self.chunk`, so that one whole chunk always fits; if some
                decode, it is at most `prompt_tokens`. `budget` is those that decode and the rest.
                If there is nothing to do, return None. Otherwise count the step, and return a
                `Plan`. Whatever yields a token, a chunk that emits or a decode, has one more token
                planned from now on. Rows that `self._to_scrub` names (slot -> start, stop) are
                scrubbed as soon as a running request has the slot. The `held` requests are in
                prefill and have no chunk. `blocked` are the slots that are free after admission, if
                requests wait. (No draft tokens.)""",
                (
                    "Who decodes is known before anything is planned: make that list first. A decode "
                    "goes into `request.next_row`, as it is before you count the new token.",
                    "Each row that decodes takes 1 of the budget, so `self.budget - len(decoding)` is left "
                    "of it. A request that has been scrubbed is scrubbed "
                    "once: `self._to_scrub.pop`.",
                    """admitted = self._admit(now)
blocked = tuple(self.free) if self.waiting else ()
running = list(self.running.values())
decoding = [r for r in running if r.phase == "decode" and r.planned < ...]
rest = max(self.budget - len(decoding), ...); if decoding: rest = min(rest, prompt_tokens)
chunks = self._chunks([r for r in running if r.is_reading], rest)
decodes = [Decode(r, r.slot, r.next_row) for r in decoding]
if not (chunks or decodes): return None
self.steps += 1
scrubs: (slot, start, stop) for each running r whose slot is in self._to_scrub
plan = Plan(step=self.steps, at=now, admitted=tuple(admitted), ...)
each one's request.planned += 1, for all `plan.emitters`
return plan""",
                ),
            ),
            Task(
                "sched.Scheduler.commit",
                """Each of `plan.emitters` gets its token, in order: the only one in the list of its
                slot. Append it to `request.answer`, unless it is below 0 (then the logits were not
                finite). `accept(request, token)` gets each, and returns why the answer ends, or
                None. It also ends with `max_tokens` tokens: "length". `self.finish` ends a request.
                A request that had ended before is a ghost: it gets no token, and `accept` is not
                called. Return `Committed`: those that ended now, the slots of ghosts, and no draft
                tokens.""",
                (
                    "`request.end` is None until the request has ended.",
                    "First append, then ask `accept`, then count: the reason that accept gives comes "
                    'before "length".',
                    """for member in plan.emitters:
    request, token = member.request, tokens[member.slot][0]
    if request.end: ghosts.append(member.slot); continue
    if token >= 0: request.answer.append(token)
    reason = accept(request, token)
    if reason is None and ...: reason = "length"
    if reason: self.finish(request, reason, now); ended.append(request)
return Committed(ended, tuple(ghosts), drafts=())""",
                ),
            ),
            Task(
                "sched.Scheduler.finish",
                """End a request in any phase: record the reason and the time (`End`), and take it
                out of the queue, or out of the running requests. One that ran leaves its slot
                (`_keep_proven_rows`), and a drain may be over (`_end_drain`). Ending it a second
                time changes nothing.""",
                (
                    "A request waits or runs, or has ended. `dict.pop(id, None)` takes out what may be "
                    "there.",
                    "If `request.end` is there already, return.",
                    """request.end = End(reason, now)
self.waiting.pop(request.id, None)
if self.running.pop(...): self._keep_proven_rows(request); self._end_drain()""",
                ),
            ),
            Task(
                "sched.Scheduler._keep_proven_rows",
                """The slot counts as used just now (`self.prefixes.use`), and remembers nothing
                (`self.prefixes.forget`), as long as you share no prefixes. And if the device has
                written any row of it (`request.prefilled`), rows that may hold NaN must be zeroed before
                the next owner: note in `self._to_scrub` which, as slot -> (start, stop). To name all
                that may have been written is right. The docstring says why fewer would do.""",
                (
                    "Attention multiplies old rows by 0, but 0 x NaN is NaN: so the next owner would "
                    "read NaN out of rows that it does not even see.",
                    "Prompt and planned tokens have been written, a ghost's among them; and on a GPU "
                    "up to `PADDING` more.",
                    """self.prefixes.use(request.slot); self.prefixes.forget(...)
if request.prefilled:
    written = len(request.prompt) + request.planned
    self._to_scrub[request.slot] = (0, ... + PADDING)""",
                ),
            ),
        ),
    ),
    Stage(
        7,
        "chunks under a budget",
        60,
        "a long prompt no longer stops the others: L in the screen shows it",
        (
            Task(
                "sched.Scheduler._cut",
                """`want` is the rest of a prompt as one chunk. Shorten it to what the budget allows.
                The chunk may have no more tokens than `left`, and than `self.chunk`. If `left` is 0, the chunk
                is empty: `start` is `stop`.""",
                (
                    "The number of tokens that fit is the smaller of left and chunk.",
                    "The chunk ends where `want` does, if that comes first.",
                    """stop = min(want.start + min(left, self.chunk), ...)
return want._replace(stop=stop)""",
                ),
            ),
            Task(
                "sched.Scheduler._allot",
                """Share what is left of the budget among prompts, of which the first is the oldest. The rest of
                one, as a chunk, is `self._want(request, chunks)`, with the chunks of this step so far. The
                prompt with the fewest tokens left (`self._tokens_left`) has its chunk first. But those
                before the oldest leave half of the budget for it, rounded up, or as many tokens as a chunk
                of the oldest can have, if that is less. Return the chunks. A prompt for which nothing is
                left has none. (Leave waiting for a common prefix aside.)""",
                (
                    "Take the tokens of each chunk off `left`.",
                    "A chunk of the oldest has at most `self.chunk` tokens, and no more than are left of it. "
                    "When it is the oldest's turn, nothing is reserved any more.",
                    """reserved = min(left - left // 2, self.chunk, ...)
for request in sorted(requests, key=self._tokens_left):
    if request is oldest: reserved = 0
    chunk = self._cut(self._want(request, chunks), left - reserved)
    if it has tokens: left -= chunk.tokens; chunks.append(chunk)""",
                ),
            ),
        ),
    ),
    Stage(
        8,
        "run-ahead",
        60,
        "the next step starts before the last one is read, and the last token is right all the same",
        (
            Task(
                "runner.Runner.start_sampling",
                """Sample the tokens (`_sample`), and remember on the device, in `self._newest`, the token
                of each slot that has one, else -1. Start all of it without waiting, with
                `self._enqueue(...)`: the tokens, the newest ones and the log probabilities. Put
                tokens, log probabilities and vectors into the step, with `device_s` and `wait_s`
                (`self._device_s`, `self._wait_s`), and return it. Its `build_s` is so far what the first
                half took; add this half, without the other two. (Leave ranks aside.)""",
                (
                    "Asking an array for its numbers (`tolist`, `item`, `mx.eval`) would wait, and "
                    "nothing here may wait.",
                    "With `first = tokens[:, 0]`: `mx.where(first >= 0, first, self._newest)`",
                    """resumed = self.clock()
step.tokens, step.logprobs, step.vectors = self._sample(step, rows)
self._newest = mx.where(...)
self._enqueue(step.tokens, self._newest, step.logprobs)
step.device_s, step.wait_s = ...
step.build_s += self.clock() - resumed - ...
return step""",
                ),
            ),
            Task(
                "nanobatch.Engine._may_stay_in_flight",
                """May the step that was just planned stay unread while the next one starts? With run-ahead it
                may; None (nothing was planned) may not. If `self.eager_first_token`, a step that yields a
                first token is read at once. (No draft tokens.)""",
                (
                    "Nothing was planned: then there is nothing to run ahead with.",
                    "`plan.is_due(self.eager_first_token)` says whether its tokens must be read first.",
                    "False if plan is None or not self.run_ahead; else whether the plan is not due",
                ),
            ),
            Task(
                "nanobatch.Engine.step",
                """One turn: plan (`self._plan()`, unless `plan` is False), start what was planned
                (`self._run(planned)`), then commit (`self._commit()` takes the oldest) until at
                most one of `self._in_flight` is left, and that one too, unless
                `self._may_stay_in_flight(planned)`. All of it within `with self._changing(),
                device_lock, device_stream():`. True if anything was planned, or was in flight. An
                exception goes to `self._fail(error)`, and the engine goes on (True); anything that
                is not an `Exception`, such as SystemExit, is raised again after that.""",
                (
                    "Whether anything was in flight is asked after the start, and before the commits.",
                    "`try` goes inside the `with`.",
                    """with self._changing(), device_lock, device_stream():
    try:
        planned = self._plan() if plan else None
        if planned: self._run(planned)
        worked = bool(self._in_flight)
        while len(self._in_flight) > 1: self._commit()
        if ... and not self._may_stay_in_flight(planned): self._commit()
        return worked
    except BaseException as error:
        self._fail(error)
        if not isinstance(error, Exception): raise
        return True""",
                ),
            ),
        ),
    ),
    Stage(
        9,
        "the KV cache in pages",
        60,
        "many more short requests fit into the same memory, with the same tokens; each step copies rows",
        (
            Task(
                "pages.Pool.grow",
                """How many pages do `rows` rows need, and how many are in the sequence's table already?
                Take the missing ones out of `self.free`, and put them at the end of its table. If too
                few are free, return False and change nothing, the table included.""",
                (
                    "17 rows need two pages of 16: round up.",
                    "`-(-rows // PAGE)` rounds up. A sequence that is new has no table yet, and one may "
                    "have more pages than it needs.",
                    """table = self.tables.get(sequence, [])
missing = -(-rows // PAGE) - ...            # may be below 0
if missing > len(self.free): return False
self.tables[sequence] = table + [self.free.pop() for _ in range(...)]
return True""",
                ),
            ),
            Task(
                "pages.Pool.leave",
                """Put all pages of the sequence back into `self.free`, and drop its table. Their
                contents may stay, because the next owner writes a row before it reads it.""",
                (
                    "`self.tables` is by sequence.",
                    "`dict.pop` returns what it takes out.",
                    "self.free += self.tables.pop(...)",
                ),
            ),
            Task(
                "pages.Pool.place",
                """Which entry of the sequence's table names the page, and how far into it is the row?""",
                (
                    "Each page has PAGE rows: row 0 to 15 are in the first.",
                    "`divmod(row, PAGE)`",
                    "return self.tables[sequence][row // ...], row % ...",
                ),
            ),
            Task(
                "pages.PagedWindow.write",
                """The new tokens are those of `self.sequences`, L of each, one sequence after the other;
                the first of each goes into its row in `self.starts`. Write each into
                `self.slab.arrays[layer]`, (pages, 2 Hkv, PAGE, Dh), where `self.slab.place` says: its keys
                into the first Hkv heads, its values into the others.""",
                (
                    "A loop over all rows is right, and slow. `mx.concatenate([k, v], axis=1)` has the "
                    "heads in their order.",
                    "An array of pages and one of places, as indices next to each other, write all rows at "
                    "once: `a[pages, :, places] = new` takes new as (rows, 2 Hkv, Dh).",
                    """new = mx.concatenate([k, v], axis=1)
for sequence, start in zip(self.sequences, self.starts):
    for row in range(start, start + self.L):
        page, place = self.slab.place(...)       # append them to pages and places
self.slab.arrays[layer][mx.array(pages), :, ...] = new""",
                ),
            ),
            Task(
                "pages.PagedWindow.read",
                """Gather: the pages of the group's sequence (number `group.slots.start` of
                `self.sequences`), in the order of its table, as one array; then the first `group.T` rows
                of it. Return keys and values, (1, Hkv, T, Dh) each.""",
                (
                    "An index that is an array of pages copies them: (pages, 2 Hkv, PAGE, Dh).",
                    "Bring the axis of the heads to the front; then pages and places are neighbours, and "
                    "can be one axis.",
                    """pages = self.slab.arrays[layer][mx.array(table)]
rows = pages.swapaxes(0, 1).flatten(1, 2)     # (2 Hkv, all rows, Dh)
rows = rows[None, :, : ...]
return mx.split(rows, 2, axis=...)""",
                ),
            ),
        ),
    ),
    Stage(
        10,
        "speculative decoding",
        45,
        "the same answers in fewer steps, where a text repeats itself; wasted rows where it does not",
        (
            Task(
                "lookup.draft",
                """Look for the newest two tokens in the text before them, from its end backwards.
                The two pairs may overlap: in "aaa", "aa" was followed by "a". Return up to `most`
                of the tokens that followed, as a list.""",
                (
                    "The newest pair itself does not count: nothing has come after it yet.",
                    "The last place where a pair may begin is three before the end of the text.",
                    """for at in range(len(text) - 3, -1, -1):
    if text[at : at + 2] == ...:
        return list(text[at + 2 : ...])
return []""",
                ),
            ),
            Task(
                "lookup.accept",
                """The first of `sampled` comes after the newest token, so it is right, whatever was
                drafted. The next one is, if the first drafted token is what the model said; and so on.""",
                (
                    "Token i of the draft is right if it is token i of what was sampled, and all before "
                    "it are right.",
                    "With n right tokens the answer gets n + 1.",
                    """right = 0
while right < len(drafted) and drafted[right] == ...: right += 1
return list(sampled[: ...])""",
                ),
            ),
            Task(
                "lookup.answer",
                """First the prompt goes in, and the last token that comes out begins the answer.
                Then, in each step, the newest token and its draft, into the row after the last
                right token. Draft no more than the answer may still use. The first accepted token
                that is in `ends` is the last one of the answer.""",
                (
                    "The newest token has no row yet: its row is number len(prompt) + len(said) - "
                    "1. Rows of wrong drafts are simply overwritten.",
                    "An answer with n tokens left may draft n - 1, because the model adds one.",
                    """said = step(prompt, 0)[-1:]
while len(said) < max_tokens and said[-1] not in ends:
    drafted = draft(prompt + said, min(most, ...))
    sampled = step([said[-1], *drafted], ...)
    for token in accept(drafted, sampled): append it, and stop at an end
return said""",
                ),
            ),
        ),
    ),
    Stage(
        11,
        "keys and values in 8 bits",
        45,
        "the memory is little more than a quarter, and answers stay the same; logits differ a little",
        (
            Task(
                "eight_bits.quantize",
                """Which numbers may share a scale, if a row must not depend on its neighbours? The
                scale is 1/127 of the largest size among them. A row of zeros has the scale 0, and
                the codes 0. If a row is not finite, its scale is not finite either.""",
                (
                    "The numbers of one row and head share a scale: the last axis.",
                    "`mx.abs(x).max(axis=-1, keepdims=True)`; and do not divide by a scale of 0, "
                    "because 0 / 0 is NaN. Round before the cast to int8, which cuts off.",
                    """scale = mx.abs(x).max(axis=-1, keepdims=True).astype(mx.float32) / 127
codes = mx.round(x / mx.where(scale == 0, 1, ...))
return codes.astype(mx.int8), scale""",
                ),
            ),
            Task(
                "eight_bits.dequantize",
                """One product. (0 times a scale that is NaN or infinite is NaN, so a row that was
                not finite stays visible.)""",
                (
                    "What is a code of 127 worth?",
                    "Each code times the scale of its row and head; the shapes fit.",
                    "return codes * ...",
                ),
            ),
            Task(
                "eight_bits.SmallWindow.write",
                """As `Window.write` in kv.py, twice: codes into `self.slab.codes[layer]`, scales into
                `self.slab.scales[layer]`, both (slots, 2 Hkv, rows, ...), keys before values.""",
                (
                    "`quantize(mx.concatenate([k, v], axis=1))` has both at once: (B * L, 2 Hkv, ...).",
                    "The rows of sequence i are number i * L to (i + 1) * L. In the slab the heads come "
                    "before the rows: swap the axes.",
                    """codes, scale = quantize(mx.concatenate([k, v], axis=1))
for i, (slot, start) in enumerate(zip(self.slots, self.starts)):
    new = slice(i * self.L, (i + 1) * self.L)
    self.slab.codes[layer][slot, :, start : start + self.L] = codes[new].swapaxes(0, 1)
    and the scales in the same way""",
                ),
            ),
            Task(
                "eight_bits.SmallWindow.read",
                """The first T rows of the group's slot (number `group.slots.start` of `self.slots`),
                codes and scales, as the numbers that they stand for; then cut keys from values.""",
                (
                    "The slab has the heads before the rows, and so has the result.",
                    "`x[None]` puts an axis of 1 in front, and `mx.split(x, 2, axis=1)` cuts the heads in two "
                    "halves.",
                    """codes = self.slab.codes[layer][slot, :, : group.T]
scales = ...
return mx.split(dequantize(codes, scales)[None], 2, axis=1)""",
                ),
            ),
        ),
    ),
    Stage(
        12,
        "two ranks on one machine",
        60,
        "two processes give the tokens of one, with half of each layer's weights and 12 messages a token",
        (
            Task(
                "ranks.route",
                """What does a prompt cost on each replica? The tokens that wait there, and those of the
                prompt after the longest prefix that one of its texts shares. Return the number of the
                cheapest replica; on ties the first.""",
                (
                    "A text may share nothing, or be shorter than the prompt. Compare token by token, up "
                    "to the first that differs.",
                    "A replica without texts shares 0 tokens: `max(..., default=0)`.",
                    """for replica in replicas:
    shared = the longest common beginning of prompt and any of replica.texts
    costs.append(replica.waiting + len(prompt) - ...)
return costs.index(min(costs))""",
                ),
            ),
            Task(
                "ranks.shard",
                """Rank 0 has the first part, rank 1 the second. Which axis is split? Rows of a weight are
                its outputs (the heads of q), and columns its inputs (the heads that o gets).
                A norm has one axis.""",
                (
                    "`mx.split(weight, size, axis=...)[rank]`",
                    "q_proj has a row for each number of each head: axis 0. What o_proj gets are the "
                    "heads of this rank: axis 1.",
                    """if weight.ndim == 1: return weight
axis = 1 if name in ("o_proj", ...) else 0
return mx.split(weight, size, axis=axis)[...]""",
                ),
            ),
            Task(
                "ranks.block",
                """norm, q, k and v, attend, o, and x added; norm, gate and up, down, and x added. What o
                and down yield is this rank's part: add it up over the ranks (`all_sum`) before x is added.
                The MLP is down(silu(gate) * up), with silu(x) = x * sigmoid(x).""",
                (
                    "x is the same on each rank already. If it went through `all_sum`, it would be "
                    "counted twice.",
                    "Everything but the two sums is the block of one rank: small_llama.py has it.",
                    """h = norm(x, w["input_layernorm"])
h = attend(h @ w["q_proj"].T, ..., ...)
x = x + all_sum(h @ w["o_proj"].T)
h = norm(x, w["post_attention_layernorm"])
gate = ...
return x + all_sum((gate * mx.sigmoid(gate) * ...) @ w["down_proj"].T)""",
                ),
            ),
        ),
    ),
)


def names(first: int = 1) -> list[str]:
    """Return the functions that are written from this stage on."""
    return [task.name for stage in STAGES[first - 1 :] for task in stage.tasks]


def tasks(first: int = 1) -> dict[str, dict[str, tuple[int, Task]]]:
    """Return chapter -> function -> (stage, task), from this stage on."""
    found: dict[str, dict[str, tuple[int, Task]]] = {}
    for stage in STAGES:
        for task in stage.tasks:
            chapter, _, function = task.name.partition(".")
            if stage.number >= first:
                found.setdefault(chapter, {})[function] = stage.number, task
    return found
