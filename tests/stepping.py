"""What the tests of generators share: how they are stepped, and the load they are compared with."""

import helpers
import layers as by_layer
import numpy as np

import jaxkv

STARTS, ENDS = [0, 8, 18], [8, 13, 20]  # a gap of five tokens before the last chunk
RANGES = dict(starts=STARTS, ends=ENDS)
SLOTS = np.random.default_rng(3).permutation(28)[:20]


def run(generator, answers=()):
    """Steps a generator to its end, answering with `answers` and then with `next`: what it yields and returns."""
    answers, seen = iter(answers), [next(generator)]
    while True:
        try:
            seen.append(generator.send(next(answers, None)))
        except StopIteration as stop:
            return seen, stop.value


def stored(model, seed=0, **options):
    options = dict(**RANGES, chunk_tokens=8, layers_per_array=1) | options
    _, cache = model.random(seed)
    return jaxkv.store(cache, np.random.default_rng(seed).permutation(model.num_slots)[:20], **options)


def parts_of(chunks, num_layers=3):
    """The answers of a load: for each layer the list of its parts."""
    return [[chunk.data[layer] for chunk in chunks] for layer in range(num_layers)]


def bulk(cache, chunks, slots=SLOTS, **options):
    options = dict(starts=STARTS[: len(chunks)], ends=ENDS[: len(chunks)]) | options
    plan = jaxkv.plan(cache, chunks, slots, **options)
    return jaxkv.load(cache, plan), plan.counts


def rows(model, pages):
    """`[layer, kv, slot, head, dim]`: all rows of a pool."""
    return helpers.raw(model.rows(by_layer.numpy(pages), np.arange(model.num_slots)))


def described(chunks):
    """What chunks say about their rows."""
    return [(chunk.num_tokens, chunk.positions, chunk.valid) for chunk in chunks]
