"""An engine in a few numbers, from a Hugging Face config or from flags, and the manifest that such
an engine would publish.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

import msgspec
import torch
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvxfer.cache.grouping import get_kv_cache_groups
from kvxfer.cache.planning import get_kv_cache_configs
from kvxfer.cache.specs import attention_layer_spec, ceil_div
from kvxfer.engine import model_config as models
from kvxfer.engine.attention import attention_backend
from kvxfer.errors import ConfigError, IncompatiblePeer, KvxferError
from kvxfer.integrations.vllm.facts import rope_text
from kvxfer.integrations.vllm.interior import SCALES
from kvxfer.integrations.vllm.specs import cannot_move
from kvxfer.tensors.attention import AttentionBackend, MultipleOf
from kvxfer.tensors.kv_cache import init_kv_cache
from kvxfer.tensors.regions import kv_regions
from kvxfer.transfer.interleave import Interleave
from kvxfer.transfer.layout import Region
from kvxfer.transfer.manifest import CacheFacts, EngineManifest, MemoryInfo, RankId, RankManifest
from kvxfer.transfer.wire import BIND_TOKENS, CAPABILITIES, PROTOCOL_MAX, PROTOCOL_MIN

EQUAL = "taken for equal"
"""Of what no geometry says."""
_INDEXER = ".indexer"
_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "fp8_e5m2"}
_ALL_IN_WINDOWS = ("mistral", "mixtral", "ministral", "starcoder2")
"""Models whose layers all have the window of a config that does not say which."""
_SPECS = {"linear_attention": "MambaSpec"}
_CHUNK = "chunk"
"""In front of the tokens of a window that is a chunk."""
_OTHER_CACHES = (
    *("num_key_value_heads_per_layer", "num_global_key_value_heads", "compress_ratios"),
    *("index_topk_freq", "index_topk_pattern"),  # not every layer has an indexer
)
_INDEXER_DIM = 128
"""Of a config with an indexer that does not say it."""
_DS_MLA_NBYTES = 656
"""A latent of 512 and 64 elements as "fp8_ds_mla"."""
_FIELDS = {"tp_size": "tp", "block_size": "block", "num_kv_shared_layers": "shared_layers"}
"""What an engine calls a key."""
_NORESERVE = 0x4000  # of Linux; mmap has a name for it from Python 3.13 on
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=512)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class Geometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: the model, and from ``tp`` on how it is served.

    ``windows``: those of the layers in turn, as in "1024/1024/full" or "chunk8192/full".
    ``shared_layers``: the last so many read the KV of earlier ones. ``engine``: whose order of
    bytes and whose prefix cache. ``kernel_block``: tokens of an attention backend's block in vLLM;
    0: a block's. ``hybrid``: layers with windows have groups of their own. ``indexer``: elements of
    a sparse indexer's key beside each latent; 0: none. ``dcp``: ranks that hold the same heads and
    take the tokens in turns (decode context parallelism), ``dcp_interleave`` of them at a time.
    """

    layers: _Size
    kv_heads: _Size = 1
    head_dim: _Size
    mla: bool = False
    indexer: _Count = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    windows: str = "full"
    shared_layers: _Count = 0
    model: str = EQUAL
    weights: str = EQUAL
    rope: str = EQUAL
    engine: Literal["vllm", "kvxfer"] = "vllm"
    device: Literal["cuda", "cpu"] = "cuda"
    tp: _Ranks = 1
    pp: _Ranks = 1
    dcp: _Ranks = 1
    dcp_interleave: _Size = 1
    block: _Size = 16
    kernel_block: _Count = 0
    layout: Literal["HND", "NHD"] = "HND"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"] = "auto"
    hybrid: bool = True
    prefix_caching: bool = True

    @property
    def cache_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else "uint8"

    @property
    def quantisation(self) -> str:
        if self.kv_cache_dtype == "fp8_ds_mla":
            return self.kv_cache_dtype
        fp8 = _FP8.get(self.kv_cache_dtype)
        return f"fp8_per_tensor {fp8}" if fp8 else "none"

    def __str__(self) -> str:
        heads = "one latent" if self.mla else f"{self.kv_heads} KV heads"
        stages = f" PP {self.pp}" if self.pp > 1 else ""
        shared = f" DCP {self.dcp} by {self.dcp_interleave}" if self.dcp > 1 else ""
        kept = self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        windows = sorted({*self.windows.split("/")} - {"full"})
        return (
            f"TP {self.tp}{stages}{shared}, blocks of {self.block} {self.layout}, {kept}: "
            f"{self.layers} layers, {heads} of {self.head_dim}"
            + (f", an indexer of {self.indexer}" if self.indexer else "")
            + (f", windows of {', '.join(windows)}" if windows else "")
        )


_KEYS = Geometry.__struct_fields__


def parse_geometry(option: str, text: str, like: Geometry | None = None) -> Geometry:
    """``[PATH,]KEY=VALUE,...``: a ``config.json`` or its folder, and what differs from it. Without
    a path, what is not said of the model is as in ``like``.

    Raises ConfigError that names option and key, IncompatiblePeer for layers that do not move.
    """
    first, *rest = [part.strip() for part in text.split(",")]
    given = dict(
        part.partition("=")[::2] for part in (rest if "=" not in first else [first, *rest])
    )
    values: dict[str, Any] = {}
    if "=" not in first:
        values = _from_file(option, Path(first), given)
    elif like is not None:
        values = {name: getattr(like, name) for name in _KEYS[: _KEYS.index("tp")]}
    values |= given
    try:
        return msgspec.convert(values, Geometry, strict=False)
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{option}: expected UTF-8, got {text!r}") from exc
    except msgspec.ValidationError as exc:
        reason, _, at = str(exc).partition(" - at `$.")
        name = at.rstrip("`")
        if not name:  # one that is missing, or not known
            raise ConfigError(
                f"{option}: {reason[:1].lower()}{reason[1:]}; give [PATH,]KEY=VALUE,... with keys "
                f"of {', '.join(_KEYS)}"
            ) from exc
        reason = reason.removeprefix("Expected ").partition(", got")[0]
        reason = reason.replace("`int`", "a whole number").replace("`bool`", "true or false")
        choices = [each for each in get_args(get_type_hints(Geometry)[name]) if str(each) == each]
        wanted = f"one of {', '.join(choices)}" if choices else reason
        got = f"got {values[name]!r}"
        raise ConfigError(f"{option}: {name}: expected {wanted}, {got}") from exc


def _from_file(option: str, file: Path, given: Mapping[str, str]) -> dict[str, Any]:
    try:
        file = file / "config.json" if file.is_dir() else file
        whole = json.loads(file.read_bytes())
        hf: dict[str, Any] = {**whole, **(whole.get("text_config") or {})}
        heads, latent = hf["num_attention_heads"], hf.get("kv_lora_rank") or 0
        others = {name: hf.get(name) for name in _OTHER_CACHES}
        if not latent:
            others["index_topk"] = hf.get("index_topk")
        if found := next((name for name, value in others.items() if value not in (None, 1)), None):
            raise IncompatiblePeer(
                f"{option}: {file}: {found}: expected one kind of K and V in all layers, got "
                f"{hf[found]}; serve this model without disaggregation"
            )
        is_one = latent or (hf.get("multi_query") and not hf.get("new_decoder_architecture"))
        kv_heads = hf.get("num_key_value_heads") or hf.get("num_kv_heads") or heads
        return {
            "layers": hf["num_hidden_layers"],
            "kv_heads": 1 if is_one else kv_heads,
            "head_dim": latent + hf["qk_rope_head_dim"]
            if latent
            else hf.get("head_dim") or hf["hidden_size"] // heads,
            "mla": bool(latent),
            "indexer": (hf.get("index_head_dim") or _INDEXER_DIM) if hf.get("index_topk") else 0,
            "dtype": hf.get("dtype") or hf.get("torch_dtype") or "float32",
            "shared_layers": hf.get("num_kv_shared_layers") or 0,
            "model": " ".join((whole["model_type"], *(whole.get("architectures") or ()))),
            "rope": rope_text(SimpleNamespace(**hf), hf.get("max_position_embeddings") or 0),
            "windows": given.get("windows") or _windows(option, file, hf),
        }
    except OSError as exc:
        raise ConfigError(
            f"{option}: expected a config.json or its folder, or KEY=VALUE,..., got {str(file)!r} "
            f"({exc.strerror})"
        ) from exc
    # RecursionError: a file nested deeper than the parser goes.
    except (
        *(ArithmeticError, AttributeError, LookupError),
        *(RecursionError, TypeError, ValueError),
    ) as exc:
        raise ConfigError(
            f"{option}: {file}: expected the config of a decoder, got {type(exc).__name__} ({exc})"
            "; give layers, kv_heads and head_dim instead"
        ) from exc


def _windows(option: str, file: Path, hf: Mapping[str, Any]) -> str:
    window, kinds = hf.get("sliding_window"), hf.get("layer_types")
    word = {models.FULL: "full", models.SLIDING: f"{window}"}
    if chunk := hf.get("attention_chunk_size"):
        word[models.CHUNKED] = f"{_CHUNK}{chunk}"
    if kinds is None:
        if not window or hf.get("use_sliding_window") is False:
            return "full"
        if hf["model_type"] in _ALL_IN_WINDOWS:
            return str(window)
        if (every := hf.get("sliding_window_pattern")) is None:
            raise ConfigError(
                f"{option}: {file}: layer_types: expected it beside sliding_window {window}, got "
                f"none; add windows=full, windows={window}, or in turn windows={window}/full"
            )
        kinds = [models.SLIDING] * (min(every, 1 << 20) - 1) + [models.FULL]
    for number, kind in enumerate(kinds):
        if kind not in word:
            refused = cannot_move(f"{option}: layer {number}", _SPECS.get(kind, kind))
            raise IncompatiblePeer(str(refused))
    return "/".join(word[kind] for kind in kinds)


# ------------------------------------------------------------------ the manifest


def make_manifest(option: str, geometry: Geometry, num_tokens: int) -> EngineManifest:
    """What an engine of this geometry would publish, with pools for one request of so many tokens.

    Raises ConfigError for sizes with which such an engine could not be started.
    """
    name = option.lstrip("-")
    try:
        model = _model(geometry)
        attention = models.attention_pattern(model)
        of_stages = _stage_regions(geometry, model, num_tokens)
    except OSError as exc:
        raise ConfigError(
            f"{option}: expected addresses for a pool of {num_tokens} tokens, got {exc.strerror}; "
            "give fewer --tokens"
        ) from exc
    except (KvxferError, LookupError, ValueError) as exc:
        said = str(exc.args[-1])
        for field, key in _FIELDS.items():
            said = said.replace(field, key)
        raise ConfigError(f"{option}: {said}") from exc
    ranks: list[RankManifest] = []
    for pp, (regions, nbytes) in enumerate(of_stages):
        for tp in range(geometry.tp):
            lo, hi = _heads(geometry, model, tp)
            ranks.append(
                RankManifest(
                    rank=RankId(pp, tp),
                    control_endpoint=f"tcp://{name}:{len(ranks) + 1}",
                    data_endpoints={},
                    memories=(MemoryInfo(device=geometry.device, nbytes=nbytes),),
                    regions=tuple(
                        replace(each, head_lo=lo, head_hi=hi, interleave=_kept(geometry, tp))
                        for each in regions
                    ),
                )
            )
    return EngineManifest(
        engine_id=name,
        incarnation=name.encode().ljust(16, b"-")[:16],
        protocol=(PROTOCOL_MIN, PROTOCOL_MAX),
        capabilities=(BIND_TOKENS, *CAPABILITIES),
        facts=CacheFacts(
            model=geometry.model,
            weights=geometry.weights,
            rope=geometry.rope,
            dtype=geometry.cache_dtype,
            quantisation=geometry.quantisation,
            num_kv_heads=geometry.kv_heads,
            head_size=geometry.head_dim,
            num_layers=geometry.layers,
            is_mla=geometry.mla,
            attention=attention,
            dcp_size=geometry.dcp,
        ),
        tp_size=geometry.tp,
        pp_size=geometry.pp,
        block_tokens=geometry.block * geometry.dcp,
        layout=geometry.layout,
        ranks=tuple(ranks),
    )


def stage_layers(num_layers: int, pp_size: int) -> list[slice]:
    """The layers of each pipeline stage, as vLLM shares them out: what is left over goes to the
    stages before the last, from the back.
    """
    counts = [num_layers // pp_size] * pp_size
    for stage in range(num_layers % pp_size):
        counts[-2 - stage] += 1
    return [slice(sum(counts[:at]), sum(counts[: at + 1])) for at in range(pp_size)]


def layer_number(name: str) -> int:
    """In the order of depth, of a layer of these manifests."""
    return int(name.split(".")[2])


def _model(geometry: Geometry) -> models.ModelConfig:
    """As much of the reference engine's model as says which heads and layers a rank has."""
    if geometry.layers < geometry.pp:
        raise ConfigError(f"pp: expected at most {geometry.layers} layers, got {geometry.pp}")
    if geometry.mla and geometry.kv_heads > 1:
        raise ConfigError(f"kv_heads: expected 1 with mla=true, got {geometry.kv_heads}")
    if geometry.indexer and not geometry.mla:
        raise ConfigError(f"indexer: expected 0 without mla=true, got {geometry.indexer}")
    if geometry.kv_cache_dtype == "fp8_ds_mla" and (geometry.mla, geometry.head_dim) != (True, 576):
        raise ConfigError(
            f"kv_cache_dtype: expected fp8_ds_mla with mla=true and head_dim=576 only, got "
            f"mla={str(geometry.mla).lower()} and head_dim={geometry.head_dim}"
        )
    _check_dcp(geometry)
    pattern = geometry.windows.split("/")
    kept = [each.removeprefix(_CHUNK) for each in pattern if each != "full"]
    num_chunks = sum(each.startswith(_CHUNK) for each in pattern)
    if num_chunks not in (0, len(kept)) or not all(t.isdecimal() and int(t) for t in kept):
        raise ConfigError(
            f"windows: expected tokens or full, or several in turn, as in 1024/full or "
            f"chunk8192/full, got {geometry.windows!r}"
        )
    windows = [None if each == "full" else int(each.removeprefix(_CHUNK)) for each in pattern]
    return replace(
        models.DEFAULT_MODEL,
        num_layers=geometry.layers,
        num_heads=geometry.kv_heads * geometry.tp,
        num_kv_heads=geometry.kv_heads,
        intermediate_size=geometry.tp,
        windows=tuple(islice(cycle(windows), geometry.layers)),
        num_kv_shared_layers=geometry.shared_layers,
        has_chunks=num_chunks > 0,
    )


def _check_dcp(geometry: Geometry) -> None:
    """What vLLM itself wants of ranks that share the tokens of the same heads."""
    if geometry.dcp == 1:
        return
    if geometry.engine != "vllm":
        raise ConfigError(f"dcp: expected 1 with engine={geometry.engine}, got {geometry.dcp}")
    if geometry.windows != "full":
        raise ConfigError(f"windows: expected full with dcp above 1, got {geometry.windows!r}")
    num_replicas = geometry.tp // geometry.kv_heads
    if not num_replicas or num_replicas % geometry.dcp:
        raise ConfigError(
            f"dcp: expected a divisor of the {num_replicas} ranks that hold the same heads, got "
            f"{geometry.dcp}; raise tp"
        )
    if geometry.block % geometry.dcp_interleave:
        raise ConfigError(
            f"dcp_interleave: expected a divisor of the block of {geometry.block} tokens, got "
            f"{geometry.dcp_interleave}"
        )


def _kept(geometry: Geometry, tp_rank: int) -> Interleave | UnsetType:
    """The tokens of a rank: vLLM deals neighbours out into the groups that share them."""
    if geometry.dcp == 1:
        return UNSET
    return Interleave(geometry.dcp, tp_rank % geometry.dcp, geometry.dcp_interleave)


def _heads(geometry: Geometry, model: models.ModelConfig, tp_rank: int) -> tuple[int, int]:
    if geometry.mla:
        return 0, 1
    shard = models.shard_for(model, tp_rank, geometry.tp)
    return shard.kv_lo, shard.kv_hi


def _stage_regions(
    geometry: Geometry, model: models.ModelConfig, num_tokens: int
) -> list[tuple[tuple[Region, ...], int]]:
    """Of the first rank of each stage: its regions, and the bytes of its pool."""
    head_lo, head_hi = _heads(geometry, model, 0)
    layers = models.attention_layers(model)
    is_packed = geometry.kv_cache_dtype == "fp8_ds_mla"
    spec_of = {
        layer.name: attention_layer_spec(
            layer.name,
            block_size=geometry.block,
            num_kv_heads=head_hi - head_lo,
            head_size=_DS_MLA_NBYTES if is_packed else geometry.head_dim,
            dtype=geometry.cache_dtype,
            sliding_window=layer.window,
            use_mla=geometry.mla,
            attention_chunk_size=layer.chunk,
        )
        for layer in layers
        if layer.target is None
    }
    if geometry.indexer:
        spec = next(iter(spec_of.values()))
        scales_nbytes = ceil_div(geometry.indexer, _INDEXER_DIM) * 4
        indexer = dataclasses.replace(
            spec, head_size=geometry.indexer + scales_nbytes, dtype="uint8"
        )
        spec_of |= {name + _INDEXER: indexer for name in spec_of}
    num_tokens = ceil_div(num_tokens, geometry.dcp * geometry.block) * geometry.block  # of a rank
    settings = SimpleNamespace(
        max_model_len=num_tokens,
        max_num_batched_tokens=num_tokens,
        disable_hybrid_kv_cache_manager=not geometry.hybrid,
    )
    config: Any = SimpleNamespace(
        model_config=settings, scheduler_config=settings, cache_config=settings
    )
    groups = get_kv_cache_groups(config, spec_of)
    # For all tokens in every group: nothing is given back here as the request goes on
    sizes = [group.kv_cache_spec.block_size for group in groups]
    settings.num_gpu_blocks_override = 1 + sum(ceil_div(num_tokens, size) for size in sizes)
    stages = [layers[each] for each in stage_layers(len(layers), geometry.pp)]
    own = [{each.name for each in stage if each.target is None} for stage in stages]
    specs = [
        {name: spec for name, spec in spec_of.items() if name.removesuffix(_INDEXER) in names}
        for names in own
    ]
    found = []
    for stage, plan in zip(
        stages, get_kv_cache_configs(config, specs, [0] * len(specs)), strict=True
    ):
        # Addresses without memory behind them: nothing is read or written there
        nbytes = sum((tensor.size + 4096 for tensor in plan.kv_cache_tensors), start=4096)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        pool = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
        names = [layer.name for layer in stage]
        names += [name + _INDEXER for name in names if geometry.indexer]
        backends = {name: _backend(geometry) for name in names}
        caches = init_kv_cache(
            [],
            {name: SimpleNamespace() for name in names},
            plan,
            backends,
            "cpu",
            allocator=partial(_take, pool),
            shared_kv_cache_layers={each.name: each.target for each in stage if each.target},
        )
        regions = kv_regions(plan, caches, backends, [pool], head_lo, head_hi)
        found.append((tuple(_planes(regions, geometry.indexer)), nbytes))
    return found


def _planes(regions: Iterable[Region], indexer_dim: int) -> Iterator[Region]:
    """An indexer's block has the rows of all keys, then those of all scales."""
    for region in regions:
        if not region.layer.endswith(_INDEXER):
            yield region
            continue
        offset, rest = region.offset, region.inner_nbytes - indexer_dim
        yield replace(region, inner_nbytes=indexer_dim, stride_token=indexer_dim)
        offset += region.kernel_cells * indexer_dim
        yield replace(region, plane=SCALES, offset=offset, inner_nbytes=rest, stride_token=rest)


def _take(pool: torch.Tensor, _nbytes: int) -> torch.Tensor:
    return pool


def _backend(geometry: Geometry) -> type[AttentionBackend]:
    """Of the reference engine, or vLLM's view ``[blocks, heads, tokens, K and V of one head]``."""
    if geometry.engine == "kvxfer" and not geometry.mla:
        return attention_backend(geometry.layout)
    width = 1 if geometry.mla else 2
    order = (0, 1, 2, 3) if geometry.layout == "HND" else (0, 2, 1, 3)
    stated: dict[str, Callable[..., object]] = {
        "get_name": lambda: geometry.layout,
        "get_kv_cache_shape": lambda n, tokens, heads, size: (n, heads, tokens, size * width),
        "get_kv_cache_stride_order": lambda: order,
        "get_supported_kernel_block_sizes": lambda: (geometry.kernel_block or MultipleOf(1),),
    }
    statics = {name: staticmethod(function) for name, function in stated.items()}
    return cast("type[AttentionBackend]", type("Cells", (), statics))
