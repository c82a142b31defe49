"""What a pool may say of its engine: values, texts and CEL rules, made from the records of `prfaas.engines`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from prfaas.api.base import Rule
from prfaas.engines import ENGINES, MAX_GPUS, EngineRecord, find_engine

RECORDS: Final = tuple(ENGINES.values())
DEFAULT: Final = RECORDS[0]
FLAGS_OF_OTHERS: Final = dict.fromkeys(flag for one in RECORDS if not one.is_ours for flag in one.flags)
PARALLEL_FLAGS: Final = "(tensor|pipeline|data)-parallel-size|(tp|pp|dp)(-size)?"
GPUS: Final = (
    "(has(self.parallelism) ? self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data : 1)"
)


def types_with(has: Callable[[EngineRecord], object]) -> tuple[str, ...]:
    """Return the types with an engine of which this is true."""
    return tuple(dict.fromkeys(one.type for one in RECORDS if has(one)))


def enumerate_words(words: Sequence[str], last: Literal["and", "or"]) -> str:
    """Return words as a sentence enumerates them."""
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


TYPES: Final = types_with(lambda _: True)
CONNECTORS: Final = tuple(one.connector for one in RECORDS if one.connector)
_ON_GPUS: Final = types_with(lambda one: one.has_parallelism)
_OURS: Final = types_with(lambda one: one.is_ours)
_EMULATED: Final = types_with(lambda one: one.is_emulated)


def _tell_experimental(names: Sequence[str]) -> str:
    verb, whose = ("is", "its fields follow its") if len(names) == 1 else ("are", "their fields follow their")
    return f"{enumerate_words(names, 'and')} {verb} experimental: {whose} documentation." if names else ""


def describe_type() -> str:
    """Return the text of `engine.type`."""
    proven = types_with(lambda one: not one.experimental)
    sentences = (
        f"Kind of engine: {DEFAULT.type} is the project's own worker.",
        f"{enumerate_words(_EMULATED, 'and')} is that worker without a model: it takes the times of a profile.",
        "The pools of a policy have one kind.",
        *(f"{one} is the frontend of a {title} deployment, for a DecodePool only." for one, title in _decode_only()),
        _tell_experimental([one for one in TYPES if one not in proven]),
    )
    return " ".join(filter(None, sentences))


def describe_connector() -> str:
    """Return the text of `engine.transfer.connector`."""
    experimental = [one.connector for one in RECORDS if one.connector and one.experimental]
    text = "Connector of vLLM; Prfaas, the project's own, if unset. All instances of a policy need the same."
    return f"{text} {_tell_experimental(experimental)}".strip()


def _decode_only() -> list[tuple[str, str]]:
    """Return type and title of the engines that no PrefillPool may have."""
    return [(one.type, one.title) for one in RECORDS if one.roles == "DecodeOnly"]


def _is_type(engine: str, types: Sequence[str]) -> str:
    """Return CEL for: the engine at this path has one of these types."""
    return f"{engine}.type == '{types[0]}'" if len(types) == 1 else f"{engine}.type in {list(types)}"


def _is_engine(engine: str, wanted: EngineRecord) -> str:
    """Return CEL for: the engine at this path is the wanted one."""
    is_type, connector = f"{engine}.type == '{wanted.type}'", f"{engine}.transfer.connector"
    if not wanted.connector:
        return is_type
    is_named = f"has({engine}.transfer) && has({connector}) && {connector} == '{wanted.connector}'"
    if find_engine(wanted.type, None) == wanted:
        is_named = f"(!has({engine}.transfer) || !has({connector}) || {connector} == '{wanted.connector}')"
    return f"{is_type} && {is_named}"


def engine_rules() -> Iterator[Rule]:
    """Yield the rules of a pool's `engine`."""
    is_ours = _is_type("self", _OURS)
    yield _forbid(
        "args",
        f"!has(self.args) || !self.args.exists(a, a.matches('^--({'|'.join(DEFAULT.flags)})(=|$)'))",
        f"args cannot set what the operator sets from the pool (--{', --'.join(DEFAULT.flags)}): change the pool's own "
        "fields",
    )
    # vLLM takes `--flag.key value` for a key of its JSON.
    yield _forbid(
        "args",
        f"{is_ours} || !has(self.args) || !self.args.exists(a, a.replace('_', '-').matches("
        f"'^--({'|'.join(FLAGS_OF_OTHERS)})([=.]|$)'))",
        "args cannot set what the operator sets for other engines (the model, its name, the address, certificates, "
        "--kv-transfer-config, --kv-events-config, --disaggregation-mode, --disaggregation-bootstrap-port): change "
        "the pool's own fields",
    )
    yield _forbid(
        "args",
        f"!({_is_type('self', _ON_GPUS)}) || !has(self.args) || !self.args.exists(a, "
        f"a.replace('_', '-').matches('^--?({PARALLEL_FLAGS})(=|$)'))",
        "sizes of parallelism stand in spec.parallelism {tensor, pipeline, data}: remove the flag",
    )
    yield Rule(
        f"{is_ours} || has(self.image)",
        "name an image of that engine, such as vllm/vllm-openai:v0.33.0",
        field="image",
        reason="FieldValueRequired",
    )
    yield Rule(
        f"({_is_type('self', _EMULATED)}) == (has(self.args) && self.args.exists(a, a.matches('^--emulate(=|$)')))",
        f"type {enumerate_words(_EMULATED, 'and')}, and no other, has --emulate in args, with a profile of "
        "`prfaas profile list`, such as --emulate=qwen3.5-397b-fp8-8xh200",
        field="args",
    )
    yield from _transfer_rules()


def _transfer_rules() -> Iterator[Rule]:
    """Yield the rules of `engine.transfer`: an engine takes the fields that it has."""
    transferring = types_with(lambda one: one.transfer_fields)
    yield _forbid(
        "transfer",
        f"!has(self.transfer) || {_is_type('self', transferring)}",
        f"transfer belongs to types {enumerate_words(transferring, 'and')}: leave it out, or change the type",
    )
    connecting = types_with(lambda one: one.connector)
    yield _forbid(
        "transfer",
        f"!has(self.transfer) || {_is_type('self', connecting)} "
        "|| !(has(self.transfer.connector) || has(self.transfer.failurePolicy))",
        f"connector and failurePolicy belong to type {enumerate_words(connecting, 'or')}: leave them out, or change "
        "the type",
    )
    configured = types_with(lambda one: "extraConfig" in one.transfer_fields)
    for type_ in transferring:
        if type_ not in configured:
            yield _forbid(
                "transfer.extraConfig",
                f"!has(self.transfer) || self.type != '{type_}' || !has(self.transfer.extraConfig)",
                f"{find_engine(type_, None).title} has no such table: give its flags in args",
            )
    for one in RECORDS:
        if one.transfer_fields and "protocol" not in one.transfer_fields:
            others = [too.connector for too in RECORDS if too.type == one.type and "protocol" in too.transfer_fields]
            yield Rule(
                "!has(self.transfer) || !has(self.transfer.protocol) || self.transfer.protocol == 'Tcp' "
                f"|| !({_is_engine('self', one)})",
                f"{one.title} transfers over TCP: leave protocol out"
                + (f", or choose connector {enumerate_words(others, 'or')}" if others else ""),
                field="transfer.protocol",
            )
        if one.config_keys:
            yield _forbid(
                "transfer.extraConfig",
                "!has(self.transfer) || !has(self.transfer.extraConfig) "
                f"|| !({_is_engine('self', one)}) "
                f"|| !self.transfer.extraConfig.exists(k, k in {list(one.config_keys)})",
                f"extraConfig cannot set what the operator sets for {one.title} ({', '.join(one.config_keys)})",
            )
    keyed = {one.protocol_key: one for one in RECORDS if one.protocol_key}
    # A connector's key is a word of its own; another one may mean something else to another engine.
    has_key = " || ".join(
        f"'{key}' in self.transfer.extraConfig" + ("" if one.connector else f" && self.type == '{one.type}'")
        for key, one in keyed.items()
    )
    yield _forbid(
        "transfer.extraConfig",
        f"!has(self.transfer) || !has(self.transfer.extraConfig) || !({has_key})",
        f"the protocol stands in transfer.protocol: remove {', or '.join(keyed)}",
    )


def _forbid(field: str, rule: str, message: str) -> Rule:
    return Rule(rule, message, field=field, reason="FieldValueForbidden")


def pool_rules() -> Iterator[Rule]:
    """Yield the rules of a pool's other fields. GPUs under other names than VENDOR/gpu are not checked."""
    builtin = types_with(lambda one: one.has_builtin_models)
    yield Rule(
        f"!has(self.engine) || !has(self.model) || {_is_type('self.engine', builtin)} "
        "|| !self.model.source.startsWith('builtin:')",
        "models that ship with the project's worker run only in that worker: give a directory such as /models/kimi",
        field="model.source",
    )
    on_gpus = f"has(self.engine) && {_is_type('self.engine', _ON_GPUS)}"
    yield _forbid(
        "parallelism",
        f"{on_gpus} || {GPUS} == 1",
        "an instance of this engine runs on one device: leave parallelism out, or choose "
        f"{enumerate_words(_ON_GPUS, 'or')}",
    )
    yield Rule(
        f"{GPUS} <= {MAX_GPUS}",
        f"an instance is one pod: tensor * pipeline * data must be at most {MAX_GPUS}",
        field="parallelism",
    )
    for one in RECORDS:
        for size, message in one.lacks_parallelism.items():
            yield _forbid(
                f"parallelism.{size}",
                f"!has(self.engine) || !has(self.parallelism) || self.parallelism.{size} == 1 "
                f"|| !({_is_engine('self.engine', one)})",
                message,
            )
    yield Rule(
        f"!({on_gpus}) || !has(self.template) || !has(self.template.resources) "
        "|| !has(self.template.resources.limits) || self.template.resources.limits.all(k, !k.endsWith('/gpu') "
        "|| !isQuantity(string(self.template.resources.limits[k])) "
        f"|| quantity(string(self.template.resources.limits[k])).isInteger() "
        f"&& quantity(string(self.template.resources.limits[k])).asInteger() == {GPUS})",
        "resources.limits must ask for tensor * pipeline * data GPUs (spec.parallelism, each 1 if unset)",
        field="template.resources.limits",
    )


def prefill_pool_rules() -> Iterator[Rule]:
    """Yield the rules of a PrefillPool's engine."""
    for type_, title in _decode_only():
        yield _forbid(
            "engine.type",
            f"!has(self.engine) || self.engine.type != '{type_}'",
            f"a {title} deployment prefills and decodes by itself: name it in a DecodePool only",
        )
