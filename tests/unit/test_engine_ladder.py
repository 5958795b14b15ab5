"""What ticks are padded to, what the device is told about them, which graphs that makes, and how prompts are dosed."""

from __future__ import annotations

import pytest
import torch

from epicycle.engine.engine import Engine
from epicycle.engine.errors import EngineError
from epicycle.engine.graph_runner import Part
from epicycle.engine.graphs import MOST_GRAPHS, parts_of
from epicycle.engine.route import Chunk, PromptQueue, Resident, TickWork
from epicycle.engine.setup import memory_errors
from epicycle.engine.slots import sampling_params
from epicycle.engine.tick import Ticket
from epicycle.engine.tick_inputs import Ladder, TickInputs, TickShape
from epicycle.engine.tick_planner import TickPlanner
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.plan import Join
from epicycle.transport.wire.request import LoopBounds, Sampling
from tests.fakes.late_tick import late_pump
from tests.fakes.serving import Ask, Serving, tiny_engine, tiny_folder

SINK = 9
CPU = torch.device("cpu")
FIXED = Sampling(max_tokens=20, temperature=0.0)
LOOPS = 4


def resident(slot: int, prompt_tokens: int, limit_tokens: int = 3000) -> Resident:
    join = Join(
        rid=slot,
        gateway=0,
        slot=slot,
        gen=1,
        prompt=pack(I32, range(prompt_tokens)),
        pages=b"",
        limit_tokens=limit_tokens,
        sampling=FIXED,
        loops=LoopBounds(),
    )
    return Resident(
        join=join,
        params=sampling_params(FIXED),
        prompt_tokens=prompt_tokens,
        limit_tokens=limit_tokens,
        pages=[],
        joined_s=0.0,
        written_tokens=0,
        max_loops=LOOPS,
        is_fixed_depth=True,
    )


class TestLadder:
    def test_the_smallest_rung_that_holds_the_rows(self) -> None:
        ladder = Ladder.of(100, 512)
        assert TickShape(48, 0) == ladder.shape(33, 0)
        assert TickShape(100, 0) == ladder.shape(97, 0)
        assert TickShape(0, 128) == ladder.shape(0, 1)
        assert TickShape(16, 240) == ladder.shape(9, 129)
        assert TickShape(0, 0) == ladder.shape(0, 0)

    def test_few_decode_rows_take_their_places_out_of_the_prompts_rung(self) -> None:
        ladder = Ladder.of(200, 2048)
        assert [2048, 2048, 512, 1024] == [
            shape.decode_rows + shape.prompt_rows
            for shape in (
                ladder.shape(5, 2040),
                ladder.shape(128, 1920),
                ladder.shape(30, 480),
                ladder.shape(200, 800),
            )
        ]
        assert TickShape(96, 256) == ladder.shape(65, 200)  # a rung of 256 would be half theirs

    @pytest.mark.parametrize("decode", [1, 8, 9, 64, 100, 200])
    def test_prompt_room_fills_a_rung_of_both(self, decode: int) -> None:
        ladder = Ladder.of(200, 2048)
        for rows in ladder.prompt:
            room = ladder.prompt_room(decode, rows)
            shape = ladder.shape(decode, room)
            assert room == shape.prompt_rows
            assert shape.decode_rows + shape.prompt_rows == rows or 4 * shape.decode_rows > rows

    def test_rows_that_begin_to_decode_do_not_stop_a_chunk_on_its_way(self) -> None:
        ladder = Ladder.of(200, 2048)
        assert TickShape(16, 2048) == ladder.shape(9, ladder.prompt_room(8, 2048))

    @pytest.mark.parametrize("slots", [1, 2, 7, 128, 129, 300, 1000])
    def test_every_shape_is_among_those_that_are_made_ready(self, slots: int) -> None:
        ladder = Ladder.of(slots, 2048)
        made = {shape for shapes in ladder.shapes() for shape in shapes}
        for decode in range(0, slots + 1, 3):
            for rows in (1, 100, 250, 481, 1000, 1793, 2016, 2048):
                shape = ladder.shape(decode, rows)
                assert shape in made
                assert shape.prompt_rows >= rows
                assert shape.decode_rows + shape.prompt_rows in ladder.row_counts()

    @pytest.mark.parametrize("slots", [1, 2, 7, 128, 129, 300, 1000])
    def test_every_number_of_rows_has_a_rung(self, slots: int) -> None:
        ladder = Ladder.of(slots, 2048)
        for rungs in (ladder.decode, ladder.beside):
            assert sorted(set(rungs)) == list(rungs)
            assert slots == rungs[-1]
        assert all(ladder.shape(rows, 0).decode_rows >= rows for rows in range(slots + 1))

    def test_decode_is_captured_before_prompts_and_both_together(self) -> None:
        parts = parts_of(Ladder.of(4, 256), has_prelude_layers=False, has_coda_layers=False)
        assert ["loop", "greedy", "sampled", "token"] == [part.name for part in parts[:4]]
        assert {TickShape(4, 0)} == {part.shape for part in parts[:4]}
        assert Part("loop", TickShape(4, 124), True) == parts[-1]
        assert len(set(parts)) == len(parts)

    def test_parts_with_layers_outside_the_core_have_graphs_of_their_own(self) -> None:
        parts = parts_of(Ladder.of(2, 128), has_prelude_layers=True, has_coda_layers=True)
        both = TickShape(2, 126)
        assert {Part("loop", both, True), Part("loop", both), Part("greedy", both, True), Part("greedy", both)} <= {
            *parts
        }

    def test_the_cap_holds_every_ladder_of_a_usual_size(self) -> None:
        parts = parts_of(Ladder.of(256, 2048), has_prelude_layers=True, has_coda_layers=True)
        assert len(parts) <= MOST_GRAPHS


class TestInputs:
    def test_padding_points_to_the_sinks(self) -> None:
        inputs = TickInputs(Ladder.of(SINK, 128), SINK, CPU)
        chunk = Chunk(resident(3, 5), 2, 3, depth=1)
        shape = inputs.place(TickWork([resident(1, 4), resident(5, 4)], [chunk]), LOOPS)
        assert [1, 5] + [SINK] * (shape.decode_rows - 2) == inputs.decode_slots(shape.decode_rows).tolist()
        slots, positions, depths, ends, state_rows = (
            column.tolist() for column in inputs.prompt_columns(shape.prompt_rows)
        )
        assert ([3] * 3 + [SINK] * (shape.prompt_rows - 3), [2, 3, 4], [1, 1, 1], [5, 5, 5]) == (
            slots,
            positions[:3],
            depths[:3],
            ends[:3],
        )
        assert 3 == len({*state_rows[:3]})
        assert {inputs.state_sink} == {*state_rows[3:]}
        assert {SINK} == {*inputs.ends[1].tolist()}

    def test_a_chunk_keeps_its_states_rows_until_its_last_loop(self) -> None:
        inputs = TickInputs(Ladder.of(SINK, 4), SINK, CPU)
        first, second = Chunk(resident(0, 2), 0, 2), Chunk(resident(1, 2), 0, 2)
        rows = []
        for depth in range(LOOPS):
            first.depth = depth
            chunks = [first] if depth % 2 else [first, second]
            inputs.place(TickWork([], chunks), LOOPS)
            rows.append(inputs.prompt_columns(4)[4].tolist()[:2])
            inputs.drop(1)
        assert 1 == len({tuple(held) for held in rows})
        assert [1, 0] == [inputs.ends[0][0].item(), inputs.ends[1][0].item()]  # its last row, its slot
        inputs.place(TickWork([], [Chunk(resident(4, 4), 0, 4)]), LOOPS)
        assert {0, 1, 2, 3} == {*inputs.prompt_columns(4)[4].tolist()}


class TestDoses:
    @pytest.fixture
    def engine(self, tmp_path_factory: pytest.TempPathFactory) -> Engine:
        return tiny_engine(tiny_folder(tmp_path_factory.mktemp("models"), "ouro"), tick="device", slots=4)

    def test_prompts_of_rows_in_step_start_where_tokens_do(self, engine: Engine) -> None:
        pump, tick = late_pump(engine, 0)
        serving = Serving(engine, pump)
        serving.submit(Ask([1, 2, 3], FIXED))
        for _ in range(2 + LOOPS):
            serving.step()
        serving.submit(Ask([4, 5], FIXED))
        serving.step()
        serving.step()
        serving.submit(Ask([6, 7], FIXED))  # while the second prompt is at its third loop
        serving.run()
        for work in tick.launched:
            depths = {chunk.depth for chunk in work.chunks}
            assert len(depths) <= 1
        assert serving.pump.counters.mixed_depth_ticks == 0
        assert any(work.loops == LOOPS and len(work.decode) == 3 for work in tick.launched)


def test_what_has_no_memory_is_named_with_the_knobs() -> None:
    with (
        pytest.raises(EngineError, match=r"kv pool: 3 slots.*lower kv_memory_bytes") as caught,
        memory_errors("kv pool: 3 slots"),
    ):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")
    assert "out_of_memory" == caught.value.code


class TestBudget:
    """A tick of a GPU takes up to 2,048 rows of prompts; 256 are the default beside decode rows."""

    @pytest.mark.parametrize(
        ("decode", "waiting", "prompt", "ordered", "rows"),
        [
            (0, 1, 3000, 0, 2048),
            (1, 2, 3000, 0, 2047),
            (2, 1, 900, 0, 254),
            (40, 1, 2048, 0, 216),
            (100, 1, 900, 0, 412),
            (40, 4, 1024, 0, 216),
            (40, 5, 1024, 0, 728),  # what small chunks would take too long to read
            (40, 12, 1024, 0, 1496),
            (8, 1, 16384, 0, 2040),
            (5, 1, 2040, 0, 251),  # 255 wanted, and a row more costs nothing
            (1, 2, 1024, 0, 2048),  # all that is left, not all but one
            (100, 1, 3000, 64, 64),
            (0, 9, 3000, 17, 17),
        ],
    )
    def test_prompt_rows_of_a_tick(self, decode: int, waiting: int, prompt: int, ordered: int, rows: int) -> None:
        prompts = PromptQueue(is_serial=False, most_chunks=32)
        for slot in range(waiting):
            prompts.add(resident(slot, prompt, limit_tokens=20000))
        planner = TickPlanner(WideTick(), prompts, LOOPS, chunk_tokens=256)
        planner.ordered_rows = ordered
        decoding = [resident(100 + number, 4) for number in range(decode)]
        assert rows == planner.next_work(decoding).prompt_rows


class WideTick:
    """The sizes of a GPU's tick, which runs fastest on a multiple of 256 rows."""

    most_chunks = 32
    takes_whole_tokens = True
    most_prompt_rows = 2048

    def prompt_room(self, decode_rows: int, rows: int) -> int:
        return -(-rows // 256) * 256 - decode_rows

    def launch(self, work: TickWork) -> Ticket:
        raise AssertionError(work)

    def drop(self, slot: int) -> None:
        raise AssertionError(slot)
