"""A first book: the functions of course/from_zero in their simplest form, written from the blank book only.

A test puts them into our chapters, because a reader who solves a task differently must pass, too. The
names that they use are defined in those chapters.
"""
# ruff: noqa: F821, B905, RUF059


# --- llama.py ---


def forward(model, ids, windows, logits_at):
    positions = mx.concatenate([window.positions for window in windows])
    operations = [Formula(kind, model.config.H, windows) for kind in model.kinds]
    x = model.table.embed(ids)
    for layer in model.layers:
        rope = rope_at(model.kinds[layer.kind], positions)
        q, k, v = heads(layer, layer.attn_norm(x), rope)
        x = x + layer.out(attend(layer, q, k, v, windows, operations[layer.kind]))
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.norm(only(x, logits_at))


def heads(layer, x, rope):
    c = layer.heads
    qkv = layer.qkv(x).reshape(-1, c.H + 2 * c.Hkv, c.Dh)
    qk = qkv[:, : c.H + c.Hkv]
    v = qkv[:, c.H + c.Hkv :]
    qk = rope(layer.qk_norm(qk))
    return qk[:, : c.H], qk[:, c.H :], v


def attend(layer, q, k, v, windows, operation):
    at = 0
    for window in windows:
        size = window.B * window.L
        window.write(layer.slab_index, k[at : at + size], v[at : at + size])
        at += size
    return operation.run(layer.slab_index, q)


class Formula:
    def run(self, layer, q):
        sums = []
        at = 0
        for window, masks in zip(self.windows, self.masks):
            for group, mask in zip(window.groups, masks):
                size = group.B * window.L
                keys, values = window.read(layer, group)
                sums.append(self.of_group(q[at : at + size], keys, values, mask))
                at += size
        return mx.concatenate(sums)


def seen(positions, T, span):
    rows = mx.arange(T)
    at = positions
    if span is None:
        return rows <= at
    return (rows <= at) & (at - rows < span)


def attention(q, k, v, mask, kind):
    count, H, Dh = q.shape
    B, Hkv, T, _ = k.shape
    L = count // B
    G = H // Hkv
    q = q.reshape(B, L, H, Dh).transpose(0, 2, 1, 3)  # (B, H, L, Dh)
    k = mx.repeat(k, G, axis=1)
    v = mx.repeat(v, G, axis=1)
    scores = q @ k.transpose(0, 1, 3, 2) / Dh**0.5 + mask
    weights = softmax(scores)
    sums = weights @ v
    return sums.transpose(0, 2, 1, 3).reshape(count, H * Dh)


# --- ops.py ---


def swiglu(gate_up):
    half = gate_up.shape[-1] // 2
    gate = gate_up[..., :half]
    return gate * mx.sigmoid(gate) * gate_up[..., half:]


def rms_norm(weight, eps):
    def norm(x):
        return x * weight / mx.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)

    return norm


# --- rope.py ---


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return x * cos + swapped * sin


def rope_angles(kind, positions):
    angles = positions.reshape(-1, 1, 1) * kind.frequencies
    return both_of_a_plane(mx.cos(angles), mx.sin(angles))


# --- kv.py ---


class Window:
    def write(self, layer, k, v):
        for i, (slot, start) in enumerate(zip(self.slots, self.starts)):
            mine = slice(i * self.L, (i + 1) * self.L)
            rows = slice(start, start + self.L)
            new = mx.concatenate([k[mine], v[mine]], axis=1)
            self.slab.arrays[layer][slot, :, rows] = self.slab.narrowed(new).swapaxes(0, 1)

    def read(self, layer, group):
        return mx.split(self.slab.arrays[layer][group.slots, :, : group.T], 2, axis=1)


# --- sampling.py ---


def draw(spread, picks, group):
    settings = [pick.sampling for pick in picks]
    filters = Filters.from_settings(settings, spread)
    ids = None
    if group == "short list":
        ids = likeliest(spread.gap, SHORT_LIST)
    if group == "long list":
        ids = likeliest(spread.gap, spread.gap.shape[-1])
    if ids is not None:
        spread = spread.only(ids)
    temperatures = column([s.temperature for s in settings])
    weights = exp_minus(spread.gap / temperatures)
    if ids is not None:
        weights = weights * keep_first(spread, filters)
    for gap in filters.gaps:
        weights = weights * (spread.gap <= gap)
    places = inverse_cdf(weights, column([uniform(pick.seed, pick.index) for pick in picks]))
    return places if ids is None else gather(ids, places)


def keep_first(spread, filters):
    k = spread.gap.shape[-1]
    keep = mx.arange(k) < filters.count
    if filters.mass is not None:
        shares = spread.weights / spread.total
        before = mx.cumsum(shares, axis=-1) - shares
        keep = keep & (before < filters.mass)
    return keep


# --- token_choice.py ---


def argmax(x):
    return x.max(axis=-1, keepdims=True), mx.argmax(x, axis=-1, keepdims=True)


def inverse_cdf(weights, u):
    sums = mx.cumsum(weights, axis=-1)
    mark = u * sums[:, -1:]
    place = (sums <= mark).sum(axis=-1, keepdims=True)
    last = (sums < sums[:, -1:]).sum(axis=-1, keepdims=True)
    return mx.minimum(place, last)


def uniform(seed, index):
    from random import Random

    return Random(f"{seed} {index}").random()


# --- request.py ---


class Request:
    def next_row(self):
        return len(self.prompt) + self.planned - 1


# --- sched.py ---


class Scheduler:
    def plan(self, now, prompt_tokens=2**63):
        admitted = self._admit(now)
        blocked = self.free if self.waiting else []
        decoding = []
        prefilling = []
        for r in self.running.values():
            if r.phase == "prefill":
                prefilling.append(r)
            elif r.planned < r.max_tokens:
                decoding.append(r)
        room = max(self.budget - len(decoding), self.chunk)
        if decoding:
            room = min(room, prompt_tokens)
        chunks = self._chunks(prefilling, room)
        if not chunks and not decoding:
            return None
        decodes = [Decode(r, r.slot, r.next_row) for r in decoding]
        scrubs = [
            (r.slot, *self._to_scrub.pop(r.slot))
            for r in self.running.values()
            if r.slot in self._to_scrub
        ]
        for each in [chunk for chunk in chunks if chunk.emits] + decodes:
            each.request.planned += 1
        self.steps += 1
        with_chunk = [chunk.request for chunk in chunks]
        return Plan(
            self.steps,
            now,
            tuple(admitted),
            tuple(scrubs),
            tuple(chunks),
            tuple(decodes),
            tuple(r for r in prefilling if r not in with_chunk),
            tuple(blocked),
            len(self.waiting),
            self.policy.name,
            len(decoding) + room,
        )

    def _admit(self, now):
        admitted = []
        free = self.free
        room = self._admissible()
        for request in list(self.policy.next(self))[:room]:
            self.waiting.pop(request.id)
            slot, why = self.prefixes.choose_slot(request.prefix.trail, free)
            free.remove(slot)
            request.admission = Admission(now, self.policy.name, slot, why)
            self.running[request.id] = request
            admitted.append(request)
        return admitted

    def _cut(self, want, left):
        return want._replace(stop=min(want.stop, want.start + min(left, self.chunk)))

    def _allot(self, requests, left):
        chunks = []
        wanted = [self._want(request, []) for request in requests]
        reserved = self._cut(wanted[0], (left + 1) // 2).tokens
        for want in sorted(wanted, key=lambda want: want.stop - want.start):
            if want is wanted[0]:
                reserved = 0
            chunk = self._cut(want, left - reserved)
            if chunk.stop == chunk.start:
                continue
            left -= chunk.tokens
            chunks.append(chunk)
        return chunks

    def commit(self, plan, tokens, accept, now):
        ended = []
        ghosts = [each.slot for each in plan.emitters if each.request.finish_reason]
        for member in plan.emitters:
            request = member.request
            token = tokens[member.slot][0]
            if request.finish_reason:
                continue
            if token >= 0:
                request.answer.append(token)
            reason = accept(request, token)
            if not reason and request.committed == request.max_tokens:
                reason = "length"
            if reason:
                self.finish(request, reason, now)
                ended.append(request)
        return Committed(ended, tuple(ghosts), ())

    def finish(self, request, reason, now):
        if request.finish_reason:
            return
        request.end = End(reason, now)
        if request.id in self.waiting:
            del self.waiting[request.id]
        elif request.id in self.running:
            del self.running[request.id]
            self._keep_proven_rows(request)
            self._end_drain()

    def _keep_proven_rows(self, request):
        self.prefixes.use(request.slot)
        self.prefixes.forget(request.slot)
        self._to_scrub[request.slot] = (0, self.max_len)


# --- runner.py ---


class Runner:
    def start_sampling(self, step, rows):
        resumed = self.clock()
        step.tokens, step.logprobs, step.vectors = self._sample(step, rows)
        newest = step.tokens[:, 0]
        self._newest = mx.where(newest < 0, self._newest, newest)
        self._enqueue(step.tokens, self._newest, step.logprobs)
        step.device_s = self._device_s
        step.wait_s = self._wait_s
        step.build_s += self.clock() - resumed - self._device_s - self._wait_s
        return step

    def _forward(self, step):
        batch = step.batch
        ids = []
        windows = []
        asked = []
        slots = []
        count = 0
        for prefill in batch.prefills:
            ids.append(mx.array(prefill.ids))
            windows.append(Window(self.slab, [prefill.slot], [prefill.start], len(prefill.ids)))
            count += len(prefill.ids)
            if prefill.emits:
                asked.append(count - 1)
                slots.append(prefill.slot)
        if batch.decodes:
            decoding = [each.slot for each in batch.decodes]
            rows = [each.row for each in batch.decodes]
            windows.append(Window(self.slab, decoding, rows, 1))
            ids.append(self._newest[mx.array(decoding)])
            asked += range(count, count + len(decoding))
            slots += decoding
        hidden = forward(self.model, mx.concatenate(ids), windows, asked)
        if asked:
            logits = self.model.head(hidden)
            self._start([logits])
            step.slots += slots
            step.hidden.append(hidden)
            step.logits.append(logits)
        else:
            self._start(self.slab.written())

    def _sample(self, step, rows):
        sampled = mx.full((self.slab.slots, 1), -1, mx.int32)
        slots = step.slots
        if not slots:
            return sampled, [], {}
        logits = step.logits[0]
        tokens, logprobs = sample(logits, [rows[slot][0] for slot in slots], self._slot_biases)
        sampled[mx.array(slots), 0] = tokens
        return sampled, logprobs, {}


# --- nanobatch.py ---


class Engine:
    def step(self, plan):
        with self._changing(), device_lock, device_stream():
            try:
                planned = None
                if plan:
                    planned = self._plan()
                if planned is not None:
                    self._run(planned)
                worked = len(self._in_flight) > 0
                while len(self._in_flight) > 1:
                    self._commit()
                if self._in_flight and not self._may_stay_in_flight(planned):
                    self._commit()
                return worked
            except BaseException as error:
                self._fail(error)
                if isinstance(error, Exception):
                    return True
                raise

    def _may_stay_in_flight(self, plan):
        if plan is None or not self.run_ahead:
            return False
        return not plan.is_due(self.eager_first_token)
