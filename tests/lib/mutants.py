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
RUNNER = "tests/core/test_runner.py"
FAULTS = "tests/core/test_failures.py"
ENGINE = "tests/core/test_engine.py"
SAMPLING = "tests/core/test_sampling.py"
GUESSES = "tests/core/test_speculative.py"
OPS = "tests/models/test_ops.py"
DOOR = "tests/server/test_app.py"
SERVE = "tests/server/test_serve.py"
WIRE = "tests/server/test_watch_frames.py"
TEXT = "tests/text/test_tokenizer.py"
CHAT = "tests/text/test_chat_template.py"
SPEECH = "tests/text/test_tool_parser.py"
GRAMMAR = "tests/text/test_grammar.py"
TRIALS = "tests/text/test_sandbox.py"
LESSONS = "tests/screen/test_lessons.py"
TOTALS = "tests/screen/test_totals.py"

CORE = [
    # --- sched.py
    Mutant(
        "sched.py",
        "waiting = len(self.waiting) - self._room()",
        "waiting = len(self.waiting)",
        f"{SCHED}::test_a_request_that_a_free_slot_takes_in_the_next_step_does_not_count_as_waiting",
    ),
    Mutant(
        "sched.py",
        'if r.phase == "decode" and r.planned < r.max_tokens]',
        'if r.phase == "decode" and r.planned <= r.max_tokens]',
        "course/from_zero/test_8_run_ahead.py",
    ),
    Mutant(
        "sched.py",
        "            if request is oldest:\n                kept = 0\n",
        "",
        f"{SCHED}::test_a_short_prompt_does_not_wait_for_a_long_one",
    ),
    Mutant(
        "sched.py",
        "it ended after this step had been planned\n                said = []",
        "it ended after this step had been planned",
        f"{SCHED}::test_random_schedules_keep_every_invariant_in_every_step",
    ),
    Mutant(
        "sched.py",
        "        self.waiting.pop(request.id, None)\n",
        "",
        f"{SCHED}::test_cancel_frees_the_slot_in_every_phase_for_the_very_next_plan",
    ),
    Mutant(
        "sched.py",
        "self._to_scrub[slot] = (request.proven, written + self.chunk)",
        "self._to_scrub[slot] = (request.proven + 1, written + self.chunk)",
        f"{SCHED}::test_a_slot_keeps_prompt_and_answer_after_a_cancel_or_an_error_elsewhere",
    ),
    Mutant(
        "sched.py",
        "OrderedDict(sorted((self.running | self.waiting).items()))",
        "OrderedDict((self.waiting | self.running).items())",
        f"{SCHED}::test_beginning_again_keeps_the_order_of_arrival",
    ),
    Mutant(
        "sched.py",
        "        if token < 0:\n            self.proven = 0\n            return",
        "        if token < 0:\n            return",
        f"{REUSE}::test_after_a_cancel_an_answer_is_remembered_and_after_an_error_nothing_is",
    ),
    # --- policies.py
    Mutant(
        "policies.py",
        "since = now if queue else max(request.came, request.turn)",
        "since = now if queue else request.came",
        f"{SCHED}::test_of_clients_that_hold_alike_fair_takes_the_one_served_longest_ago",
    ),
    # --- prefix.py
    Mutant(
        "prefix.py",
        "(len(trail.tokens) - 1) // self.segment",
        "len(trail.tokens) // self.segment",
        f"{SCHED}::test_the_longest_common_beginning_is_found_whatever_was_held_and_forgotten",
    ),
    Mutant(
        "prefix.py",
        "            node.slots.discard(slot)\n",
        "            pass\n",
        f"{SCHED}::test_the_longest_common_beginning_is_found_whatever_was_held_and_forgotten",
    ),
    Mutant(
        "prefix.py",
        "return rows if is_own else 0",
        "return rows",
        f"{DOOR}::test_cached_tokens_tell_nothing_of_another_clients_prompt",
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
        "seen & (rows > positions - span)",
        "seen & (rows >= positions - span)",
        f"{OPS}::test_a_window_hides_the_rows_before_it_and_no_other",
    ),
    Mutant(
        "kv.py",
        "T = max(ends[first:i])",
        "T = ends[i - 1]",
        f"{RUNNER}::test_a_pass_for_each_sequence_gives_the_same_bits_as_one_for_all",
    ),
    Mutant(
        "kv.py",
        "        for array in self.arrays:\n            array[slot, :, start:stop] = 0",
        "        for array in self.arrays[1:]:\n            array[slot, :, start:stop] = 0",
        f"{GUESSES}::test_a_wrong_guess_that_is_not_finite_spoils_no_right_row",
    ),
    # --- llama.py
    Mutant(
        "llama.py",
        "            scale = 1.0\n",
        "",
        "tests/core/test_parity.py::test_every_token_and_logit_is_mlx_lms_in_random_company[gemma2]",
    ),
    Mutant(
        "llama.py",
        "mx.split(qkv, [c.H + c.Hkv], axis=1)",
        "mx.split(qkv, [c.H], axis=1)",
        f"{OPS}::test_heads_stand_where_the_fused_projection_puts_them",
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
        f"{SAMPLING}::test_requests_that_follow_each_other_in_a_slot_have_their_own_bias",
    ),
    Mutant(
        "sampling.py",
        "is_said = mx.arange(width) < column(counts)",
        "is_said = mx.arange(width) <= column(counts)",
        f"{SAMPLING}::test_the_penalties_count_the_tokens_of_the_answer_and_no_other",
    ),
    # --- nanobatch.py
    Mutant(
        "nanobatch.py",
        "mx.where(first >= 0, first, self._newest)",
        "mx.where(first > 0, first, self._newest)",
        f"{ENGINE}::test_token_0_is_a_token_like_any_other",
    ),
    Mutant(
        "nanobatch.py",
        "self._ledger.open[request.id] = handle\n            self.changed.notify_all()",
        "self._ledger.open[request.id] = handle",
        f"{ENGINE}::test_an_idle_engine_sleeps_and_a_submit_wakes_it",
    ),
    Mutant(
        "nanobatch.py",
        "with self._changing(), self.changed:\n            if handle.id in self._ledger.open:",
        "with self._changing():\n            if handle.id in self._ledger.open:",
        f"{ENGINE}::test_cancel_frees_the_slot_at_once_in_every_phase",
    ),
    Mutant(
        "nanobatch.py",
        "            self._slab_is_lost = True\n",
        "",
        f"{FAULTS}::test_what_a_failed_step_held_is_let_go_though_the_exception_is_kept",
    ),
]

SERVER = [
    Mutant(
        "server/completion.py",
        'settings["seed"] += 1',
        'settings["seed"] += 0',
        f"{SERVE}::test_choices_with_a_seed_have_the_seeds_that_follow",
    ),
    Mutant(
        "server/completion.py",
        "        self._logged = now\n",
        "",
        f"{DOOR}::test_the_log_tells_how_far_a_long_prompt_is",
    ),
    Mutant(
        "server/completion.py",
        "prompts = metrics[:: self.wish.n]",
        "prompts = metrics",
        f"{SERVE}::test_choices_with_a_seed_have_the_seeds_that_follow",
    ),
    Mutant(
        "server/choice.py",
        "alike = (item.nth + 1 for item",
        "alike = (item.nth for item",
        "tests/server/test_choice.py::test_calls_are_numbered_among_themselves",
    ),
    Mutant(
        "server/app.py",
        "if answer and answer.waits_for(handle):",
        "if answer:",
        "tests/server/test_delta.py::test_one_wake_up_a_step_and_one_for_a_whole_answer",
    ),
    Mutant(
        "server/app.py",
        "            answer.forget()\n",
        "",
        "tests/server/test_memory.py::test_nothing_is_left_of_requests_that_have_ended",
    ),
    Mutant(
        "server/http.py",
        "is_own = is_ours and (options.api_key is not None or is_address(visit.host))",
        "is_own = is_ours",
        f"{SERVE}::test_beyond_this_machine_pages_of_other_names_may_not_ask",
    ),
    Mutant(
        "server/http.py",
        "return is_here and not has_proxy and visit.host in LOOPBACK",
        "return is_here and visit.host in LOOPBACK",
        f"{WIRE}::test_who_reads_texts_through_nginx_on_this_machine",
    ),
    Mutant(
        "server/http.py",
        'path in ("/", "/health")',
        'path.startswith("/")',
        f"{SERVE}::test_with_a_key_only_health_is_free",
    ),
    Mutant(
        "server/access_log.py",
        "            self._lines.put_nowait(lost + line)\n            self._lost = 0",
        "            self._lines.put_nowait(lost + line)",
        f"{DOOR}::test_a_log_says_how_many_lines_it_has_lost",
    ),
    Mutant(
        "server/watch_frames.py",
        "lengths=request.lengths[tokens:])",
        "lengths=request.lengths[characters:])",
        f"{WIRE}::test_every_frame_is_the_same_at_the_other_end",
    ),
    Mutant(
        "server/anthropic.py",
        '"input_tokens": usage.prompt - usage.cached',
        '"input_tokens": usage.prompt',
        "tests/server/test_conformance.py::test_what_was_cached_is_counted_apart",
    ),
    Mutant(
        "server/responses.py",
        "        self._sent += 1\n",
        "",
        "tests/server/test_conformance.py::test_a_streamed_response_is_a_sequence_of_typed_events",
    ),
    Mutant(
        "server/schema.py",
        "    if count > most:",
        "    if count > most + 1:",
        f"{SERVE}::test_a_body_with_too_many_of_something_is_refused_by_their_number",
    ),
    Mutant(
        "server/embeddings_api.py",
        '"index": index,',
        '"index": len(data) + 1,',
        "tests/server/test_embeddings.py::test_a_text_or_several_get_their_vectors_in_order",
    ),
]

PLAIN_TEXT = [
    Mutant(
        "text/tokenizer.py",
        "if not 0 <= token < self.vocabulary:",
        "if not 0 <= token <= self.vocabulary:",
        f"{SAMPLING}::test_a_setting_that_names_a_token_outside_the_vocabulary_is_refused_at_submit",
    ),
    Mutant(
        "text/tokenizer.py",
        "behind, length, self.stop = max(found)",
        "behind, length, self.stop = min(found)",
        f"{TEXT}::test_stop_strings_worked_out_by_hand",
    ),
    Mutant(
        "text/tokenizer.py",
        "return text.removesuffix(self._held)",
        "return text",
        f"{TEXT}::test_stop_strings_worked_out_by_hand",
    ),
    Mutant(
        "text/tokenizer.py",
        "ids[:2] == [bos, bos] else ids",
        "ids[:1] == [bos] else ids",
        f"{TEXT}::test_a_prompt_has_bos_once_if_the_tokenizer_adds_it_or_the_text_has_it",
    ),
    Mutant(
        "text/tool_parser.py",
        "self.thought = self._length - len(self._text)",
        "self.thought = self._length",
        f"{SPEECH}::test_a_prompt_that_ends_with_a_mark_has_begun_the_thought",
    ),
    Mutant(
        "text/tool_parser.py",
        "call = CALLING.search(text, len(thought))",
        "call = CALLING.search(text)",
        f"{SPEECH}::test_a_watcher_sees_thoughts_and_calls_without_to_know_the_model",
    ),
    Mutant(
        "text/tool_parser.py",
        "words = without_space(words.removesuffix(beginning(mark, words)))",
        "words = without_space(words)",
        f"{SPEECH}::test_random_answers_come_apart_as_they_were_put_together_however_they_are_cut",
    ),
    Mutant(
        "text/grammar.py",
        "        ahead = self.copy()\n",
        "        ahead = self\n",
        f"{GRAMMAR}::test_a_grammar_answers_for_several_places_and_stands_where_it_stood",
    ),
    Mutant(
        "text/grammar.py",
        "            if len(self._verdicts) >= KNOWN:\n                self._verdicts.clear()\n",
        "",
        f"{GRAMMAR}::test_a_grammar_is_tried_once_and_the_verdicts_that_are_kept_are_not_many",
    ),
    Mutant(
        "text/sandbox.py",
        "self._unfit = said.decode().strip()\n                raise ValueError(self._unfit)",
        "raise ValueError(said.decode().strip())",
        f"{TRIALS}::test_what_cannot_be_prepared_is_said_and_not_tried_again",
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
        "screen/step_columns.py",
        "return rows - prompt + 1 if rows >= prompt > 0 else 0",
        "return rows - prompt if rows >= prompt > 0 else 0",
        "tests/screen/test_keys.py::test_back_in_time_an_answer_shows_just_the_letters_that_had_come",
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
        f"{LESSONS}::test_the_lesson_of_batching_is_measured_by_rows_and_told_in_words",
    ),
    Mutant(
        "screen/recording.py",
        "step=step.step - first + 1",
        "step=step.step - first",
        "tests/screen/test_recording.py::test_a_race_is_recorded_as_two_runs_with_the_same_numbers_and_the_same_answers",
    ),
    Mutant(
        "screen/talk_history.py",
        "if not (turn.is_dropped or turn.request.error):",
        "if not turn.request.error:",
        "tests/screen/test_conversation_page.py::test_what_does_not_fit_waits_and_drop_or_new_makes_room",
    ),
    Mutant(
        "screen/remote_client.py",
        "                self._life += 1\n",
        "",
        "tests/screen/test_watch.py::test_when_the_other_end_goes_the_screen_says_since_when_and_begins_anew_with_the_next",
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
        "tests/screen/test_keys.py::test_a_screen_whose_model_could_not_be_loaded_ends_with_code_2",
    ),
]
MUTANTS = [*CORE, *SERVER, *PLAIN_TEXT, *SCREEN]
