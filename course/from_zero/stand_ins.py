"""Stand-ins for later stages in a handout, where our functions are left out.

Each does just enough for the checks of earlier stages: one sequence at a time, no run-ahead.
`overlay.swapped` puts the code into the chapters, so it uses the names of a chapter.
"""
# ruff: noqa: F821


# --- stage 2 ---


def rms_norm(weight, eps):
    def norm(x):
        return mx.fast.rms_norm(x, weight, eps)

    return norm


def swiglu(gate_up):
    half = gate_up.shape[-1] // 2
    return gate_up[..., :half] / (1 + mx.exp(-gate_up[..., :half])) * gate_up[..., half:]


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    planes = x[..., :half] + 1j * x[..., half:]
    planes = planes * (cos[..., :half] + 1j * sin[..., half:])
    return mx.concatenate([mx.real(planes), mx.imag(planes)], axis=-1)


def rope_angles(kind, positions):
    angles = mx.concatenate([kind.frequencies * p for p in positions.tolist()])
    angles = angles.reshape(len(positions), 1, -1)
    return both_of_a_plane(mx.cos(angles), mx.sin(angles))


# --- stage 3: keys and values are appended, as on rung 2 of the ladder ---


def seen(positions, T, span):
    return (mx.tril(mx.ones((T, T)))[positions.flatten()] > 0)[None, None]


def attend(layer, q, k, v, windows, formula):
    (window,) = windows
    kept = vars(window.slab).setdefault("kept", {})
    new = mx.concatenate([k, v], axis=1).swapaxes(0, 1)[None]
    if window.starts[0]:
        new = mx.concatenate([kept[layer.slab_index], new], axis=2)
    kept[layer.slab_index] = new
    return attention(q, *mx.split(new, 2, axis=1), formula.masks[0][0], formula.kind)


# --- stage 7 ---


class Scheduler:
    def _cut(self, want, left):
        stop = min(want.start + left, want.start + self.chunk, want.stop)
        return want._replace(stop=stop)

    def _allot(self, requests, left):
        """First come, first served."""
        chunks = []
        for request in requests:
            want = self._want(request, chunks)
            chunk = self._cut(want, left - sum(each.tokens for each in chunks))
            if chunk.tokens:
                chunks.append(chunk)
        return chunks


# --- stage 8: wait for each step ---


class Runner:
    def start_sampling(self, step, rows):
        step.tokens, step.logprobs, step.vectors = self._sample(step, rows)
        newest = self._newest.tolist()
        for slot, (token, *_) in enumerate(step.tokens.tolist()):
            newest[slot] = token if token >= 0 else newest[slot]
        self._newest = mx.array(newest)
        return step


class Engine:
    def _may_stay_in_flight(self, plan):
        return False

    def step(self, plan=True):
        planned = self._plan()
        if planned:
            self._run(planned)
            self._commit()
        return planned is not None
