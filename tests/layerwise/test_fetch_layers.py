"""fetch_layers: what is written layer by layer is what a load in bulk writes; iterators share nothing."""

import gc
import weakref

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import IMPLEMENTATIONS, POOLS, Model, Scene, assert_same, small

import jaxkv
from jaxkv.layerwise import fetch

RANGES = dict(starts=[20, 0, 12, 8], ends=[28, 8, 17, 8])


def scene(model=None, **options):
    """Four chunks, unsorted, one of them empty, with gaps between them."""
    return Scene(Model("A2") if model is None else model, 28, **RANGES, **options)


def plan(scene, cache=None, chunks=None, slots=None, **options):
    cache = scene.model.spec if cache is None else cache
    chunks = scene.chunks if chunks is None else chunks
    options = dict(starts=scene.starts, ends=scene.ends, **options)
    return jaxkv.plan(cache, chunks, scene.slots if slots is None else slots, **options)


def wanted(scene, slots=None, **options):
    slots = scene.slots if slots is None else slots
    model = scene.model
    return helpers.loaded(model, model.arrays(), scene.rows, slots, scene.starts, scene.ends, **options)[0]


def check(scene, made, zero=False, **options):
    after = by_layer.load(scene.model.poisoned(), made, **options)
    assert_same(after.pages, wanted(scene, zero=zero))


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_layout(pool):
    """A1 to A36, A54, D19, H7: chunks of a bulk store, fetched layer by layer, gaps zeroed; padding is untouched."""
    made = scene(small(pool), layers_per_array=1)
    check(made, plan(made, gaps="zero"), zero=True)


@pytest.mark.parametrize("layers_per_array", [None, 1, 2, 3])
def test_arrays_of_any_number_of_layers(layers_per_array):
    """Bulk chunks too: an array that holds several layers is sent once, before the first of them."""
    made = scene(Model("A2", layers=5), layers_per_array=layers_per_array)
    for ahead in (0, 1, 2, 9):
        for implementation in IMPLEMENTATIONS:
            check(made, plan(made), ahead=ahead, implementation=implementation)


@pytest.mark.parametrize("pool", ["A1", "A2", "A5"])
@pytest.mark.parametrize("layers_per_array", [None, 2, 1])
def test_layers_of_an_array_as_one(layers_per_array, pool):
    """Grouped: one Staged, and one write, for all layers that share an array; turned keys and gaps included."""
    model = Model(pool, layers=3, rope=(turning.rope(8), None, turning.rope(8, 1e6)))
    made = scene(model, layers_per_array=layers_per_array)
    options = dict(gaps="zero", positions=np.arange(28) + 9)
    want = jaxkv.load(model.poisoned(), plan(made, **options))
    pages, spec, first = by_layer.split(model.poisoned()), model.spec, 0
    for staged in jaxkv.fetch_layers(plan(made, **options), grouped=True):
        last = first + staged.num_layers
        if by_layer.is_slab(spec):
            pages[0] = by_layer.write(pages[0], staged)
        elif staged.num_layers == 1:
            pages[first] = by_layer.write(pages[first], staged)
        else:
            pages[first:last] = by_layer.write(tuple(pages[first:last]), staged)
            with pytest.raises(ValueError, match="layers were staged as one"):
                staged.kv()
            with pytest.raises(ValueError, match="layers were staged as one"):
                staged.replace(jnp.zeros((28, 4, 8), spec.dtype), jnp.zeros((28, 4, 8), spec.dtype))
        first = last
    assert first == 3
    assert_same(by_layer.join(pages, spec).pages, helpers.snapshot(want.pages))


FORMATS = [
    "layer kv | token head dim",
    "kv | layer token head dim",
    "layer token head (kv dim)",
    "page layer kv token head dim",
]


@pytest.mark.parametrize("format", FORMATS)
def test_chunk_formats(format):
    """A42 to A45: the layer is taken out of arrays of every order, K and V in one array or two."""
    made = scene(format=format)
    check(made, plan(made))


def test_chunks_of_different_rows_and_formats():
    """D1, D4: each run of alike chunks is one scatter; the last of equal slots wins across runs, too."""
    model, rng = Model("A2"), np.random.default_rng(0)
    arrays, cache = model.random()
    chunks, rows = [], []
    for n, rows_of, format in ((8, 8, None), (5, 8, None), (3, 4, None), (8, 8, "KV_2TD"), (2, 16, None)):
        source = rng.permutation(28)[:n]
        options = dict(chunk_tokens=rows_of, format=format, layers_per_array=None if format else 1)
        chunks += jaxkv.store(cache, source, **options)
        rows.append(model.rows(arrays, source))
    slots = rng.integers(-1, 28, 26)
    made = jaxkv.plan(model.spec, chunks, slots)
    ends = np.cumsum([8, 5, 3, 8, 2]).tolist()
    want = helpers.loaded(model, model.arrays(), rows, slots, [0, *ends[:-1]], ends)[0]
    for implementation in IMPLEMENTATIONS:
        after = by_layer.load(model.poisoned(), made, implementation=implementation)
        assert_same(after.pages, want)
    assert_same(jaxkv.load(model.poisoned(), made).pages, want)


@pytest.mark.parametrize("kind", ["layer parts", "lists", "generator"])
@pytest.mark.parametrize("size", [0, 2])
def test_parts_that_come_later(kind, size):
    """`parts=`: chunks without data; each layer's arrays are asked for when they are to be sent, and not earlier."""
    made = scene(Model("A2", layers=5))
    _, cache = made.model.random(0)
    source = np.random.default_rng(0).permutation(28)[:28]
    parts = by_layer.store(cache, source, size=size, starts=made.starts, ends=made.ends, chunk_tokens=8)
    chunks = turning.without_data(jaxkv.join_layers(parts))
    late, asked = plan(made, chunks=chunks, data_later=True), []

    def given():
        for part in parts:
            asked.append(part.layers[0])
            yield part if kind == "layer parts" else [x[0] if kind == "lists" else x for x in part.data]

    steps = jaxkv.fetch_layers(late, parts=given() if kind != "lists" else list(given()), ahead=1)
    if kind != "lists":
        assert asked == []
    pages = list(made.model.poisoned().pages)
    for layer, staged in enumerate(steps):
        if kind != "lists":
            groups = by_layer.groups(5, size or 1)
            current = sum(group.start <= layer for group in groups)
            assert asked == [group.start for group in groups][: current + 1]
        pages[layer] = by_layer.write(pages[layer], staged)
    assert_same(pages, wanted(made))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_program_for_all_layers(implementation):
    """B30: of layers alike, whatever their slots, positions and values; local and global ropes are alike."""
    model = Model("A2", layers=4, rope=(turning.rope(8), turning.rope(8, 1e6)) * 2)
    requests = [turning.Moving(model, 20, seed=seed) for seed in range(2)]
    traced = []

    def write(page, staged):
        traced.append(1)
        return jaxkv.write(page, staged, implementation=implementation)

    write = jax.jit(write, donate_argnums=0)
    for request in requests:
        pages = list(model.poisoned().pages)
        for layer, staged in enumerate(jaxkv.fetch_layers(request.plan())):
            pages[layer] = write(pages[layer], staged)
        request.check(request.rows_of(jaxkv.PagedCache(tuple(pages), model.spec)))
    assert len(traced) == 1


def test_nothing_to_fetch():
    """R8, F34, B15: as many steps, and the pages as they were."""
    model = Model("A2", rope=turning.rope(8))
    made = scene(model)
    for call in (
        jaxkv.plan(model.spec, (), []),
        jaxkv.plan(model.spec, (), [], positions=[]),
        jaxkv.plan(model.spec, (), np.arange(5), starts=[], ends=[], gaps="zero"),
        plan(made, slots=np.full(28, -1)),
        plan(made, slots=np.full(28, -1), gaps="zero", positions=np.arange(28)),
    ):
        after = by_layer.load(model.poisoned(), call)
        assert_same(after.pages, model.arrays())
        for staged in jaxkv.fetch_layers(call):
            k, v, valid = staged.kv()
            assert not np.asarray(valid).any() and not helpers.raw(k).any() and not helpers.raw(v).any()


def test_interleaved_iterators():
    """E6, G11, H11: two and more, of other chunks, slots and gaps, each in its own pages; one plan used twice."""
    many = [scene(Model("A2"), seed=seed) for seed in range(3)]
    calls = [plan(one, gaps="zero" if seed % 2 else "keep") for seed, one in enumerate(many)]
    steps = [jaxkv.fetch_layers(call, ahead=seed) for seed, call in enumerate([*calls, calls[0]])]
    pages = [list(Model("A2").poisoned().pages) for _ in steps]
    for layer in range(3):
        for at, step in enumerate(steps):
            pages[at][layer] = by_layer.write(pages[at][layer], next(step))
    assert all(next(step, None) is None for step in steps)
    for at, one in enumerate([*many, many[0]]):
        assert_same(pages[at], wanted(one, zero=at % 2 == 1 and at < 3))


def count_sent(monkeypatch):
    """Weak references to everything that `fetch_layers` sends to the device."""
    sent, put = [], jax.device_put

    def device_put(values, *args, **options):
        out = put(values, *args, **options)
        sent.extend(weakref.ref(x) for x in jax.tree.leaves(out))
        return out

    monkeypatch.setattr(fetch.jax, "device_put", device_put)
    return sent


@pytest.mark.parametrize("how", ["close", "throw", "abandon"])
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_left_at_any_step(taken, how, monkeypatch):
    """E20, E21, E22, H10: finished layers are written, the others as they were, what was staged is freed."""
    made = scene(layers_per_array=1)
    call = plan(made)
    sent = count_sent(monkeypatch)
    pages, steps = list(made.model.poisoned().pages), jaxkv.fetch_layers(call, ahead=1)
    for layer in range(taken):
        pages[layer] = by_layer.write(pages[layer], next(steps))
    assert len(sent) >= 4 * taken
    if how == "close":
        steps.close()
    elif how == "throw":
        with pytest.raises(KeyError):
            steps.throw(KeyError("the caller's"))
    del steps
    gc.collect()
    jax.block_until_ready(pages)
    # The table of slots stays with the plan; KV does not.
    assert not [ref for ref in sent if ref() is not None and ref().ndim > 1]
    monkeypatch.undo()
    assert_same(pages, [*wanted(made)[:taken], *made.model.arrays()[taken:]])
    check(made, call)
    del call
    gc.collect()
    assert not [ref for ref in sent if ref() is not None]


def test_tables_are_sent_once_for_a_plan(monkeypatch):
    """A plan that is loaded again finds its slots and delta tables on the device; another plan has its own."""
    made = scene(layers_per_array=1)
    sent = count_sent(monkeypatch)
    call = plan(made)
    counts = []
    for planned in (call, call, plan(made)):
        before = len(sent)
        for _ in jaxkv.fetch_layers(planned):
            pass
        counts.append(len(sent) - before)
    assert counts[1] == counts[0] - 1 and counts[2] == counts[0]


def test_device_memory_is_that_of_the_layers_ahead(monkeypatch):
    """No more than `ahead` arrays a chunk beyond the one that is taken."""
    made = scene(Model("A2", layers=8), layers_per_array=1)
    call = plan(made)
    sent, most = count_sent(monkeypatch), []
    for staged in jaxkv.fetch_layers(call, ahead=2):
        jax.block_until_ready(staged)
        del staged
        gc.collect()
        most.append(sum(ref() is not None for ref in sent))
    assert max(most) <= 3 * 4 + 1  # and the table of slots


def test_beginning_at_a_later_layer():
    """`first_layer`: the layers before it are not sent; only the first of an array will do."""
    made = scene(Model("A2", layers=5), layers_per_array=2)
    pages = list(made.model.poisoned().pages)
    for layer, staged in enumerate(jaxkv.fetch_layers(plan(made), first_layer=2), 2):
        pages[layer] = by_layer.write(pages[layer], staged)
    assert_same(pages, [*made.model.arrays()[:2], *wanted(made)[2:]])
    with pytest.raises(ValueError, match=r"first_layer: .*3.*0, 2, 4"):
        jaxkv.fetch_layers(plan(made), first_layer=3)


def test_inside_jit():
    """R5: chunks fetched and written in one program; slots traced."""
    made = scene()

    @jax.jit
    def run(cache, chunks, slots):
        call = jaxkv.plan(cache, chunks, slots, starts=made.starts, ends=made.ends, gaps="zero")
        pages = list(cache.pages)
        for layer, staged in enumerate(jaxkv.fetch_layers(call)):
            pages[layer] = jaxkv.write(pages[layer], staged)
        return pages

    for slots in (made.slots, np.where(made.slots % 5, made.slots, 99)):
        pages = run(made.model.poisoned(), made.chunks, jnp.asarray(slots, jnp.int32))
        assert_same(pages, wanted(made, slots, zero=True))


def test_chunks_are_whole_afterwards():
    """R1, F27."""
    made = scene(Model("A2", rope=turning.rope(8)))
    before = helpers.snapshot([c.data for c in made.chunks])
    by_layer.load(made.model.poisoned(), plan(made, positions=np.arange(28) + 100))
    assert_same([c.data for c in made.chunks], before)


def without(parts, change):
    return lambda: iter(change(list(parts)))


WRONG = {
    "fewer layers": (lambda p: p[:2], ValueError, "layer 2, 3 layers"),
    "out of order": (lambda p: [p[1], p[0], p[2]], ValueError, r"\(1, 2\) where \(0, 1\)"),
    "fewer chunks": (lambda p: [x.data[:2] for x in p], ValueError, "layer 0 has parts of 2 chunks, the plan has 4"),
    "other rows": (
        lambda p: [[y[0][:4] for y in x.data] for x in p],
        ValueError,
        r"layer 0.*\(4, 2, 32\).*\(8, 2, 32\)",
    ),
    "more arrays": (lambda p: [[y * 2 for y in x.data] for x in p], ValueError, "layer 0, chunk 0: got 2"),
    "no arrays": (lambda p: [[np.asarray(y[0]) for y in x.data] for x in p], TypeError, "layer 0.*ndarray"),
    "other dtype": (lambda p: [[y[0].astype("float32") for y in x.data] for x in p], TypeError, "float32.*bfloat16"),
    "nothing": (lambda p: [None] * 3, ValueError, "none are left for layer 0"),
    "a number": (lambda p: [1, 2, 3], TypeError, "layer 0.*4 chunks.*int"),
    "a chunk missing": (lambda p: [[None, *x.data[1:]] for x in p], TypeError, "layer 0, chunk 0.*NoneType"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parts(case):
    """M37, H8: the layer and both numbers; nothing of that layer was written."""
    change, error, words = WRONG[case]
    made = scene()
    _, cache = made.model.random(0)
    parts = by_layer.store(cache, np.arange(28), starts=made.starts, ends=made.ends, chunk_tokens=8)
    late = plan(made, chunks=turning.without_data(jaxkv.join_layers(parts)), data_later=True)
    target = made.model.poisoned()
    with pytest.raises(error, match=words):
        by_layer.load(target, late, parts=iter(change(list(parts))), writer=jaxkv.write)
    assert_same(target.pages, made.model.arrays())
    by_layer.load(target, late, parts=parts)


def test_wrong_arguments():
    """R9, E23: named at the call, before anything is sent."""
    made = scene()
    with pytest.raises(TypeError, match="plan: expected a Plan, got tuple"):
        jaxkv.fetch_layers(tuple(made.chunks))
    for ahead in (-1, 1.5, True):
        with pytest.raises(ValueError, match=f"ahead: .*{ahead}"):
            jaxkv.fetch_layers(plan(made), ahead=ahead)
    with pytest.raises(ValueError, match="chunk 0 has no data; give it with parts="):
        jaxkv.fetch_layers(plan(made, chunks=turning.without_data(made.chunks), data_later=True))
    uneven = [made.chunks[0], *scene(layers_per_array=1).chunks[1:]]
    with pytest.raises(ValueError, match="chunk 1 has 1 layers in an array, chunk 0 has"):
        jaxkv.fetch_layers(plan(made, chunks=uneven))
    fused = scene(format="(layer kv) token head dim")
    with pytest.raises(ValueError, match="fused"):
        jaxkv.fetch_layers(plan(fused))
