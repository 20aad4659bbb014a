"""Small mistakes, one at a time, and for each a test that fails with it.

`old` occurs exactly once in the file, and `new` takes its place. `tests/docs/test_mutants.py` keeps
the table true; its long form applies each mutant and runs the test.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    test: str  # a test file, or one test of it


SCHED = "tests/core/test_sched.py"
REUSE = "tests/core/test_prefix_caching.py"
SLOTS = "tests/engine/test_disk_prefix_cache.py"
FAULTS = "tests/core/test_failures.py"
ENGINE = "tests/core/test_engine.py"
SAMPLING = "tests/core/test_sampling.py"
SPECULATIVE = "tests/core/test_speculative.py"
OPS = "tests/models/test_ops.py"
DOOR = "tests/server/test_app.py"
SERVE = "tests/server/test_serve.py"
WIRE = "tests/server/test_watch_frames.py"
AUTH = "tests/server/test_auth.py"
TEXT = "tests/text/test_tokenizer.py"
CHAT = "tests/text/test_chat_template.py"
SPEECH = "tests/text/test_tool_parser.py"
GRAMMAR = "tests/text/test_grammar.py"
TRIALS = "tests/base/test_job_process.py"
LESSONS = "tests/screen/test_lessons.py"
TOTALS = "tests/screen/test_busy_periods.py"
COLUMNS = "tests/screen/test_timeline_columns.py"

CORE = [
    # --- sched.py
    Mutant(
        "sched.py",
        "waiting = len(self.waiting) - self._room()",
        "waiting = len(self.waiting)",
        f"{SCHED}::test_queue_limit_ignores_requests_with_a_free_slot",
    ),
    Mutant(
        "sched.py",
        'if r.phase == "decode" and r.planned < r.max_tokens]',
        'if r.phase == "decode" and r.planned <= r.max_tokens]',
        f"{SCHED}::test_no_step_is_planned_after_the_last_token",
    ),
    Mutant(
        "sched.py",
        "            if request is oldest:\n                kept = 0\n",
        "",
        f"{SCHED}::test_short_prompt_does_not_wait_for_a_long_one",
    ),
    Mutant(
        "sched.py",
        "it ended after this step had been planned\n                said = []",
        "it ended after this step had been planned",
        f"{SCHED}::test_random_schedules",
    ),
    Mutant(
        "sched.py",
        "        self.waiting.pop(request.id, None)\n",
        "",
        f"{SCHED}::test_cancel_frees_the_slot_for_the_next_plan",
    ),
    Mutant(
        "sched.py",
        "self._to_scrub[slot] = (request.proven, written + self.chunk)",
        "self._to_scrub[slot] = (request.proven + 1, written + self.chunk)",
        f"{SCHED}::test_slot_keeps_its_rows_after_a_cancel",
    ),
    Mutant(
        "sched.py",
        "OrderedDict(sorted((self.running | self.waiting).items()))",
        "OrderedDict((self.waiting | self.running).items())",
        f"{SCHED}::test_restart_keeps_the_order_of_arrival",
    ),
    Mutant(
        "sched.py",
        "        if token < 0:\n            self.proven = 0\n            return",
        "        if token < 0:\n            return",
        f"{REUSE}::test_cancel_keeps_the_cache_and_error_drops_it",
    ),
    # --- policies.py
    Mutant(
        "policies.py",
        "since = now if queue else max(request.came, request.turn)",
        "since = now if queue else request.came",
        f"{SCHED}::test_fair_breaks_ties_by_last_service",
    ),
    # --- prefix.py
    Mutant(
        "prefix.py",
        "return self._longest(trail, len(trail.tokens) - 1, slots)",
        "return self._longest(trail, len(trail.tokens), slots)",
        f"{SCHED}::test_longest_cached_prefix_is_found",
    ),
    Mutant(
        "prefix.py",
        "            node.slots.discard(slot)\n",
        "            pass\n",
        f"{SCHED}::test_longest_cached_prefix_is_found",
    ),
    Mutant(
        "prefix.py",
        "return rows if is_own else 0",
        "return rows",
        f"{DOOR}::test_cached_tokens_reveal_no_other_clients_prompt",
    ),
    # --- kv.py
    Mutant(
        "kv.py",
        "for start in starts):\n            raise",
        "for start in starts[:1]):\n            raise",
        f"{OPS}::test_a_window_outside_the_slab_is_refused",
    ),
    Mutant(
        "llama.py",
        "visible & (rows > positions - span)",
        "visible & (rows >= positions - span)",
        f"{OPS}::test_sliding_window_mask",
    ),
    Mutant(
        "kv.py",
        "T = max(ends[first:i])",
        "T = ends[i - 1]",
        f"{OPS}::test_mask_is_per_sequence",
    ),
    Mutant(
        "kv.py",
        "        for array in self.arrays:\n            array[slot, :, start : min",
        "        for array in self.arrays[1:]:\n            array[slot, :, start : min",
        f"{SPECULATIVE}::test_non_finite_draft_spoils_no_row",
    ),
    # --- llama.py
    Mutant(
        "llama.py",
        "        scale = 1.0\n",
        "",
        "tests/kernels/test_gpu.py::test_tokens_equal_mlx_lm_under_every_policy",
    ),
    Mutant(
        "llama.py",
        "mx.split(qkv, [c.H + c.Hkv], axis=1)",
        "mx.split(qkv, [c.H], axis=1)",
        f"{OPS}::test_fused_projection_head_order",
    ),
    # --- sampling.py
    Mutant(
        "sampling.py",
        "keep & (above < filters.mass * spread.total)",
        "keep & (above <= filters.mass)",
        f"{SAMPLING}::test_bisection_keeps_what_a_sort_would_keep",
    ),
    Mutant(
        "sampling.py",
        "if built_for is not wanted:",
        "if not built_for:",
        f"{SAMPLING}::test_next_request_in_a_slot_has_its_own_bias",
    ),
    Mutant(
        "sampling.py",
        "is_said = mx.arange(width) < column(counts)",
        "is_said = mx.arange(width) <= column(counts)",
        f"{SAMPLING}::test_penalties_count_the_answer_alone",
    ),
    # --- runner.py
    Mutant(
        "runner.py",
        "mx.where(first >= 0, first, self._newest)",
        "mx.where(first > 0, first, self._newest)",
        f"{ENGINE}::test_token_0_is_a_token_like_any_other",
    ),
    # --- nanobatch.py
    Mutant(
        "nanobatch.py",
        "self.registry.open[request.id] = handle\n            self.changed.notify_all()",
        "self.registry.open[request.id] = handle",
        f"{ENGINE}::test_submit_wakes_an_idle_engine",
    ),
    Mutant(
        "nanobatch.py",
        "with self._changing(), self.changed:\n            if handle.id in self.registry.open:",
        "with self._changing():\n            if handle.id in self.registry.open:",
        f"{ENGINE}::test_cancel_frees_the_slot_in_every_phase",
    ),
    Mutant(
        "nanobatch.py",
        "            self._slab_is_lost = True\n",
        "",
        f"{FAULTS}::test_failed_step_frees_its_memory",
    ),
]

RUNTIME = [
    Mutant(
        "engine/disk_prefix_cache.py",
        "if saved.key != self._key:",
        "if not saved.key:",
        f"{SLOTS}::test_file_of_another_model_is_ignored",
    ),
    Mutant(
        "engine/slot_files.py",
        "if blake2b(data[:-DIGEST], digest_size=DIGEST).digest() != data[-DIGEST:]:",
        "if len(data) < DIGEST:",
        f"{SLOTS}::test_damaged_file_is_never_answered_from",
    ),
    Mutant(
        "engine/disk_prefix_cache.py",
        'facts.append(f"{name} {value}")',
        "pass",
        f"{SLOTS}::test_dtype_of_keys_is_part_of_the_model",
    ),
    Mutant(
        "engine/watch_frames.py",
        "lengths=request.lengths[tokens:])",
        "lengths=request.lengths[characters:])",
        f"{WIRE}::test_frames_survive_the_wire",
    ),
]

SERVER = [
    Mutant(
        "server/completion.py",
        'settings["seed"] += 1',
        'settings["seed"] += 0',
        f"{SERVE}::test_choices_have_consecutive_seeds",
    ),
    Mutant(
        "server/completion.py",
        "        self._logged = now\n",
        "",
        f"{DOOR}::test_log_reports_progress_of_long_prompts",
    ),
    Mutant(
        "server/completion.py",
        "prompts = metrics[:: self.parsed.n]",
        "prompts = metrics",
        f"{SERVE}::test_choices_have_consecutive_seeds",
    ),
    Mutant(
        "server/choice.py",
        "alike = (item.nth + 1 for item",
        "alike = (item.nth for item",
        "tests/server/test_choice.py::test_calls_are_numbered_among_themselves",
    ),
    Mutant(
        "server/choice.py",
        "if word.offset < len(text)]",
        "if word.offset <= len(text)]",
        "tests/server/test_choice.py::test_words_end_with_the_answer",
    ),
    Mutant(
        "server/app.py",
        "if answer and (answer.parsed.stream or handle.request.finish_reason):",
        "if answer:",
        "tests/server/test_delta.py::test_one_wake_up_per_step",
    ),
    Mutant(
        "server/app.py",
        "            answer.forget()\n",
        "",
        "tests/server/test_memory.py::test_no_leak_from_ended_requests",
    ),
    Mutant(
        "server/auth.py",
        "is_own = is_ours and (options.api_key is not None or is_address(request.host))",
        "is_own = is_ours",
        f"{AUTH}::test_foreign_pages_are_refused",
    ),
    Mutant(
        "server/auth.py",
        "return is_here and not has_proxy and request.host in LOOPBACK",
        "return is_here and request.host in LOOPBACK",
        f"{AUTH}::test_texts_through_a_local_proxy",
    ),
    Mutant(
        "server/auth.py",
        'path in ("/", "/health")',
        'path.startswith("/")',
        f"{AUTH}::test_api_key_protects_all_but_health",
    ),
    Mutant(
        "server/access_log.py",
        "            self._lines.put_nowait(lost + line)\n            self._lost = 0",
        "            self._lines.put_nowait(lost + line)",
        f"{DOOR}::test_log_counts_lost_lines",
    ),
    Mutant(
        "server/anthropic.py",
        '"input_tokens": usage.prompt - usage.cached',
        '"input_tokens": usage.prompt',
        "tests/server/test_conformance.py::test_cached_tokens_are_counted_separately",
    ),
    Mutant(
        "server/responses.py",
        "        self._sent += 1\n",
        "",
        "tests/server/test_conformance.py::test_streamed_response_events",
    ),
    Mutant(
        "server/body_reader.py",
        "    if count > most:",
        "    if count > most + 1:",
        f"{SERVE}::test_counts_in_a_body_are_limited",
    ),
    Mutant(
        "server/embeddings.py",
        '"index": index,',
        '"index": len(data) + 1,',
        "tests/server/test_embeddings.py::test_embeddings_in_order",
    ),
]

PLAIN_TEXT = [
    Mutant(
        "text/tokenizer.py",
        "if not 0 <= token < self.vocabulary:",
        "if not 0 <= token <= self.vocabulary:",
        f"{SAMPLING}::test_token_outside_the_vocabulary_is_refused",
    ),
    Mutant(
        "text/detokenizer.py",
        "after, length, self.stop = max(found)",
        "after, length, self.stop = min(found)",
        f"{TEXT}::test_stop_strings_by_hand",
    ),
    Mutant(
        "text/detokenizer.py",
        "return text.removesuffix(self._held)",
        "return text",
        f"{TEXT}::test_stop_strings_by_hand",
    ),
    Mutant(
        "text/tokenizer.py",
        "ids[:2] == [bos, bos] else ids",
        "ids[:1] == [bos] else ids",
        f"{TEXT}::test_prompt_has_one_bos",
    ),
    Mutant(
        "text/tool_parser.py",
        "self.reasoning_length = self._length - len(self._text)",
        "self.reasoning_length = self._length",
        f"{SPEECH}::test_prompt_may_open_the_reasoning",
    ),
    Mutant(
        "text/tool_parser.py",
        "call = CALLING.search(text, len(reasoning))",
        "call = CALLING.search(text)",
        f"{SPEECH}::test_split_output_without_the_model",
    ),
    Mutant(
        "text/tool_parser.py",
        "words = strip_held_space(words.removesuffix(beginning(mark, words)))",
        "words = strip_held_space(words)",
        f"{SPEECH}::test_random_answers_are_parsed_however_cut",
    ),
    Mutant(
        "text/grammar.py",
        "        ahead = self.copy()\n",
        "        ahead = self\n",
        f"{GRAMMAR}::test_masks_of_several_tokens_leave_the_state_unchanged",
    ),
    Mutant(
        "text/grammar.py",
        "            if len(self._verdicts) >= KNOWN:\n                self._verdicts.clear()\n",
        "",
        f"{GRAMMAR}::test_grammar_verdicts_are_cached_and_bounded",
    ),
    Mutant(
        "base/job_process.py",
        "self._unfit = said.decode().strip()\n                raise ValueError(self._unfit)",
        "raise ValueError(said.decode().strip())",
        f"{TRIALS}::test_failed_prepare_is_remembered",
    ),
]

SCREEN = [
    Mutant(
        "screen/state.py",
        "if r.reason or id >= oldest}",
        "if r.reason or id}",
        f"{TOTALS}::test_requests_whose_ends_were_missed_are_forgotten",
    ),
    Mutant(
        "screen/state.py",
        "kept = min(self.REMEMBERED, max(1, bisect_right(taken, self.TEXTS)))",
        "kept = self.REMEMBERED",
        f"{TOTALS}::test_of_requests_with_long_texts_fewer_can_be_opened",
    ),
    Mutant(
        "screen/timeline_columns.py",
        "return rows - prompt + 1 if rows >= prompt > 0 else 0",
        "return rows - prompt if rows >= prompt > 0 else 0",
        "tests/screen/test_keys.py::test_back_in_time_an_answer_is_cut_where_it_was",
    ),
    Mutant(
        "screen/draw/style.py",
        'hides = category in ("Cc", "Cf", "Cs", "Zl", "Zp")',
        'hides = category in ("Cc", "Cs", "Zl", "Zp")',
        "tests/screen/test_style.py::test_what_draws_nothing_is_shown_as_such",
    ),
    Mutant(
        "screen/draw/charts.py",
        "dear}, and yield {many / few / cost:.2f}",
        "dear}, and yield {many / few * cost:.2f}",
        f"{LESSONS}::test_why_batching_pays_by_rows",
    ),
    Mutant(
        "screen/export_recording.py",
        "step=step.step - first + 1",
        "step=step.step - first",
        "tests/screen/test_recording.py::test_a_race_is_recorded_as_two_runs",
    ),
    Mutant(
        "screen/chat_history.py",
        "if not (turn.is_dropped or turn.request.error):",
        "if not turn.request.error:",
        "tests/screen/test_conversation_page.py::test_a_question_that_does_not_fit_waits_for_drop_or_new",
    ),
    Mutant(
        "screen/remote_client.py",
        "                self._epoch += 1\n",
        "",
        "tests/screen/test_watch.py::test_a_lost_server_is_shown_and_reconnected",
    ),
    Mutant(
        "tui.py",
        "if len(args.size) != 2:",
        "if len(args.size) > 2:",
        "tests/screen/test_log.py::test_a_wrong_option_gets_one_line_and_exit_code_2",
    ),
    Mutant(
        "tui.py",
        "    cli.say(state.view.error or state.printed)\n    return 2",
        "    cli.say(state.view.error or state.printed)\n    return 1",
        "tests/screen/test_keys.py::test_a_model_that_cannot_be_loaded_gives_exit_code_2",
    ),
    Mutant(
        "screen/timeline_columns.py",
        "rows[slot] += not is_ghost",
        "rows[slot] += 1",
        f"{COLUMNS}::test_a_ghost_fills_no_row",
    ),
    Mutant(
        "screen/busy_period_stats.py",
        "tokens = len(step.view.decode) - len(step.view.ghosts)",
        "tokens = len(step.view.decode)",
        f"{COLUMNS}::test_a_ghost_is_no_gap_between_two_tokens",
    ),
    Mutant(
        "screen/state.py",
        "later = sum(r.ended > moment for r in self.ended)",
        "later = sum(r.ended >= moment for r in self.ended)",
        f"{COLUMNS}::test_back_in_time_only_earlier_ends_count",
    ),
    Mutant(
        "screen/state.py",
        "self.selected %= len(self.view.engine.slots)",
        "self.selected = min(slot, len(self.view.engine.slots) - 1)",
        f"{COLUMNS}::test_after_the_last_slot_the_first_is_selected",
    ),
    Mutant(
        "screen/draw/charts.py",
        "    few = min(costs)\n",
        "    few = next(iter(costs))\n",
        f"{COLUMNS}::test_the_cost_of_a_row_in_words",
    ),
]
MUTANTS = [*CORE, *RUNTIME, *SERVER, *PLAIN_TEXT, *SCREEN]
