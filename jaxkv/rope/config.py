"""One frequency set from a model's config, with Hugging Face's field names.

What a config leaves unsaid comes from `models.MODELS`, or is an error that names the field. So is
whatever contradicts itself: a rotation with wrong frequencies gives fluent nonsense, never a crash.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..rotation import Pairing, checked_pairing
from .models import UNROTATED, RopeModel, model_named, type_of_architecture
from .scaling import KNOWN_FIELDS, SCALINGS, SYNONYMS, Case, Config, Scaled


@dataclasses.dataclass(frozen=True)
class RopeFields:
    """What a config says about one frequency set.

    Attributes:
        scaled: the frequencies and what comes with them.
        pairing: which channels turn together.
        axes: for each frequency the position component that drives it; None for plain positions.
        description: one line for messages.
    """

    scaled: Scaled
    pairing: Pairing
    axes: tuple[int, ...] | None
    description: str


def read_config(config: Any, *, layer_type: str | None, sequence_length: int | None, pairing: str | None) -> RopeFields:
    """The frequency set of one layer type.

    Args:
        config: a mapping or an object with Hugging Face's field names. Of a multimodal config the
            `text_config` is read.
        layer_type: which layers, where they differ (`"full_attention"`, `"sliding_attention"`, ...).
        sequence_length: tokens of the sequence, for scalings that depend on it (dynamic, longrope).
        pairing: `"half"` or `"interleaved"`, for caches whose channel order differs from the config's
            or models that `models.MODELS` does not know; it wins over both.

    Returns:
        The fields for `Rope`.

    Raises:
        TypeError: for a config that is neither a mapping nor an object with fields.
        ValueError: for a model without rotary positions, an unknown rope type or field, a field that is
            missing, malformed or contradicts another one (named), or a pairing that nothing tells.
    """
    if config is None or isinstance(config, (str, bytes, int, float, list, tuple)):
        raise TypeError(f"config: expected a mapping or an object with a config's fields, got {config!r}")
    fields = Config(config)
    name = _model_type(fields)
    if (text := fields.get("text_config")) is not None:
        fields = Config(text)
        name = _model_type(fields) or name
    _refuse_unrotated(fields, name)
    model = model_named(name)
    settings, theta, nested = _settings(fields, model, layer_type)
    rope_type = _rope_type(settings)
    head_dim, width = _widths(fields, settings, model, layer_type, nested)
    scaled = SCALINGS[rope_type](Case(settings, fields, theta, width, head_dim, sequence_length))
    return RopeFields(
        scaled,
        _pairing(fields, model, name, pairing),
        _axes(settings, model, len(scaled.inv_freq)),
        f"{scaled.regime or rope_type}, theta {theta:g}, {width} of {head_dim} channels",
    )


def mrope_axes(sections: Sequence[int], *, interleaved: bool, count: int) -> tuple[int, ...]:
    """Which position component drives each frequency of an M-RoPE model.

    Sections in a row take their components in turn (Qwen2-VL's `mrope_section`); interleaved ones
    alternate time, height, width from the first frequency on, and what is left over is time's
    (Qwen3-VL's `mrope_interleaved`). Both as in huggingface/transformers.

    Args:
        sections: frequencies of each section.
        interleaved: which of the two.
        count: frequencies in all.

    Returns:
        `count` component numbers, 0 to 2.

    Raises:
        ValueError: if the sections do not add up to `count`, or interleaved ones are not three that fit.
    """
    sections = list(sections)
    if not all(isinstance(size, int) and size >= 0 for size in sections):
        raise ValueError(f"mrope_section must hold whole numbers, got {sections}")
    if sum(sections) != count:
        raise ValueError(f"mrope_section {sections} adds up to {sum(sections)}, but there are {count} frequencies")
    if not interleaved:
        return tuple(i % 3 for i, size in enumerate(sections) for _ in range(size))
    if len(sections) != 3 or 3 * sections[1] - 2 > count or 3 * sections[2] - 1 > count:
        raise ValueError(f"mrope_section {sections} cannot be interleaved over {count} frequencies")
    axes = [0] * count
    for axis in (1, 2):
        for i in range(axis, 3 * sections[axis], 3):
            axes[i] = axis
    return tuple(axes)


def _model_type(fields: Config) -> str | None:
    if (name := fields.get("model_type")) is not None:
        return str(name)
    for architecture in fields.get("architectures") or ():
        if (name := type_of_architecture(architecture)) is not None:
            return name
    return None


def _accepted() -> str:
    return f"accepted are {', '.join((*SCALINGS, *SYNONYMS))}"


def _refuse_unrotated(fields: Config, name: str | None) -> None:
    scheme = UNROTATED.get(name) if name else None
    attention = fields.get("attn_config")
    if fields.get("alibi") or (attention is not None and Config(attention).get("alibi")):
        scheme = "alibi"
    kind = fields.get("position_embedding_type")
    if kind is not None and kind not in ("rope", "rotary"):
        scheme = f"position_embedding_type {kind!r}"
    if scheme is not None:
        raise ValueError(f"keys of model type {name!r} use {scheme}, not a rotation; {_accepted()}")


def _rope_settings(fields: Config) -> dict[str, Any]:
    found = {
        name: dict(value) for name in ("rope_parameters", "rope_scaling") if (value := _mapping(name, fields.get(name)))
    }
    first, *others = found.values() or [{}]
    if any(other != first for other in others):
        raise ValueError("config contradicts itself: rope_parameters and rope_scaling differ")
    return first


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping, got {value!r}")
    return value


def _settings(fields: Config, model: RopeModel | None, layer_type: str | None) -> tuple[Config, float, bool]:
    """The rope dict of one layer type, its base, and whether the dict is this layer type's own."""
    settings: Mapping[str, Any] = _rope_settings(fields)
    names: tuple[str, ...] = ("rope_theta", "rotary_emb_base")
    default, nested = model.theta if model else None, False
    local = _local_base(fields, model)
    if any(isinstance(value, Mapping) for value in settings.values()):
        nested = True
        settings = _mapping(f"rope_parameters[{layer_type!r}]", _of_layer_type(settings, layer_type))
    elif local is not None or (settings and model and model.local_unscaled):
        sliding = {"partial_rotary_factor": settings.get("partial_rotary_factor")}
        if local is None:
            sliding["rope_theta"] = settings.get("rope_theta")
        settings = _of_layer_type({"full_attention": settings, "sliding_attention": sliding}, layer_type)
        if layer_type == "sliding_attention" and local is not None:
            names, default = ("rope_local_base_freq",), local
    for field, value in settings.items():
        if field not in KNOWN_FIELDS and value is not None:
            raise ValueError(f"unknown rope field {field!r}; known are {', '.join(sorted(KNOWN_FIELDS))}")
    theta = _one_value(Config(settings), "rope_theta", fields, names, nested)
    if theta is None:
        theta = default
    if theta is None:
        raise ValueError("config lacks rope_theta")
    if theta <= 1:
        raise ValueError(f"rope_theta must be above 1, got {theta}")
    return Config(settings), theta, nested


def _local_base(fields: Config, model: RopeModel | None) -> float | None:
    base = fields.number("rope_local_base_freq")
    return model.local_theta if base is None and model else base


def _one_value(settings: Config, name: str, fields: Config, names: tuple[str, ...], nested: bool) -> float | None:
    """What the rope dict and the config around it say of one thing."""
    own = settings.number(name)
    if nested and own is not None:
        return own  # what one layer type says of itself goes before what is said of all
    outer_name, outer = fields.agreed(*names)
    if own is not None and outer is not None and own != outer:
        raise ValueError(f"config contradicts itself: {outer_name}={outer} but {name}={own} in the rope settings")
    return outer if own is None else own


def _of_layer_type(kinds: Mapping[str, Any], layer_type: str | None) -> Any:
    if not isinstance(layer_type, str) or layer_type not in kinds:
        raise ValueError(
            f"layers of this model differ: layer_type must be one of {', '.join(map(repr, kinds))}, got {layer_type!r}"
        )
    if kinds[layer_type] is None:
        raise ValueError(f"layers of type {layer_type!r} have no rope; describe them with None")
    return kinds[layer_type]


def _rope_type(settings: Config) -> str:
    kinds = {}
    for field in ("rope_type", "type"):
        if (kind := settings.get(field)) is not None:
            kinds[field] = SYNONYMS.get(str(kind), str(kind))
            if kinds[field] not in SCALINGS:
                raise ValueError(f"unknown rope type {kind!r}; {_accepted()}")
    if len(set(kinds.values())) > 1:
        raise ValueError(
            f"config contradicts itself: rope_type={settings.get('rope_type')!r} but type={settings.get('type')!r}"
        )
    return next(iter(kinds.values()), "default")


def _widths(
    fields: Config, settings: Config, model: RopeModel | None, layer_type: str | None, nested: bool
) -> tuple[int, int]:
    """Channels of a head, and how many of them turn."""
    latent = fields.integer("qk_rope_head_dim")
    head_dim = _head_dim(fields, layer_type, latent)
    names = ("partial_rotary_factor", "rotary_pct")
    part = _one_value(settings, names[0], fields, names, nested)
    count = fields.integer("rotary_dim")
    if latent is not None:
        # MLA keeps the channels that turn apart; the other widths are those of the queries.
        wholes = [head_dim, latent + (fields.integer("qk_nope_head_dim") or 0)]
        if part not in (None, 1) and latent not in [int(whole * part) for whole in wholes]:
            raise ValueError(f"config contradicts itself: qk_rope_head_dim={latent} but partial_rotary_factor={part}")
        head_dim = width = latent
    elif part is not None:
        width = int(head_dim * part)
        if count is not None and count != width:
            raise ValueError(f"config contradicts itself: rotary_dim={count} but partial_rotary_factor={part}")
    elif count is not None:
        width = count
    else:
        width = (model.rotary_dim or int(head_dim * model.rotated)) if model else head_dim
    if width % 2 or not 0 < width <= head_dim:
        raise ValueError(f"rotary width {width} must be even and fit a head of {head_dim} channels")
    return head_dim, width


def _head_dim(fields: Config, layer_type: str | None, latent: int | None) -> int:
    found = fields.integer("global_head_dim") if layer_type == "full_attention" else None
    found = found or fields.integer("head_dim") or latent
    if found is None:
        hidden = fields.integer("hidden_size", "n_embd")
        heads = fields.integer("num_attention_heads", "n_head")
        if hidden is None or not heads:
            raise ValueError("config lacks head_dim, and hidden_size or num_attention_heads to tell it")
        found = hidden // heads
    return found


def _pairing(fields: Config, model: RopeModel | None, name: str | None, given: str | None) -> Pairing:
    if given is not None:
        return checked_pairing(given)
    readings: tuple[tuple[str, Pairing, Pairing], ...] = (
        ("rope_interleave", "interleaved", "half"),
        ("is_neox_style", "half", "interleaved"),
    )
    said: dict[str, Pairing] = {}
    for field, if_true, if_false in readings:
        if (value := fields.get(field)) is not None:
            if not isinstance(value, bool):
                raise ValueError(f"{field} must be true or false, got {value!r}")
            said[field] = if_true if value else if_false
    if len(set(said.values())) > 1:
        raise ValueError("config contradicts itself: rope_interleave and is_neox_style name different pairings")
    if said:
        return next(iter(said.values()))
    if model is None:
        raise ValueError(
            f"pairing is unknown for model type {name!r}: its config says neither rope_interleave nor "
            f"is_neox_style, and jaxkv.rope.models does not list it; give pairing='half' or 'interleaved'"
        )
    return model.pairing


def _axes(settings: Config, model: RopeModel | None, count: int) -> tuple[int, ...] | None:
    sections, said = settings.get("mrope_section"), settings.get("mrope_interleaved")
    expected = model.interleaved_sections if model else None
    if sections is None:
        if expected is not None:
            raise ValueError("config lacks mrope_section, which its model type needs")
        return None
    if said is not None and expected is not None and bool(said) != expected:
        raise ValueError(f"config contradicts itself: mrope_interleaved={said!r} for its model type")
    interleaved = expected if said is None else bool(said)
    if interleaved is None:
        raise ValueError(
            "config has mrope_section, but neither mrope_interleaved nor a model type that tells its order"
        )
    return mrope_axes(sections, interleaved=interleaved, count=count)
