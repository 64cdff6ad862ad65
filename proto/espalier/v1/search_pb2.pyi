from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Algorithm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALGORITHM_UNSPECIFIED: _ClassVar[Algorithm]
    ALGORITHM_GREEDY: _ClassVar[Algorithm]
    ALGORITHM_MAJORITY: _ClassVar[Algorithm]
    ALGORITHM_BEST_OF_N: _ClassVar[Algorithm]
    ALGORITHM_BEAM: _ClassVar[Algorithm]
    ALGORITHM_CHAIN: _ClassVar[Algorithm]
    ALGORITHM_ADAPTIVE: _ClassVar[Algorithm]
    ALGORITHM_DVTS: _ClassVar[Algorithm]
    ALGORITHM_LOOKAHEAD: _ClassVar[Algorithm]
    ALGORITHM_REBASE: _ClassVar[Algorithm]
    ALGORITHM_PARTICLE: _ClassVar[Algorithm]
    ALGORITHM_MCTS: _ClassVar[Algorithm]
    ALGORITHM_AUTO: _ClassVar[Algorithm]

class Aggregation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATION_UNSPECIFIED: _ClassVar[Aggregation]
    AGGREGATION_LAST: _ClassVar[Aggregation]
    AGGREGATION_MIN: _ClassVar[Aggregation]
    AGGREGATION_PROD: _ClassVar[Aggregation]
    AGGREGATION_MEAN: _ClassVar[Aggregation]

class Vote(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VOTE_UNSPECIFIED: _ClassVar[Vote]
    VOTE_NAIVE: _ClassVar[Vote]
    VOTE_WEIGHTED: _ClassVar[Vote]
    VOTE_MAJORITY: _ClassVar[Vote]
    VOTE_CONFIDENCE: _ClassVar[Vote]
    VOTE_TAIL_CONFIDENCE: _ClassVar[Vote]
    VOTE_LOWEST_CONFIDENCE: _ClassVar[Vote]

class EarlyStop(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOP_UNSPECIFIED: _ClassVar[EarlyStop]
    EARLY_STOP_OFF: _ClassVar[EarlyStop]
    EARLY_STOP_DECIDED: _ClassVar[EarlyStop]
    EARLY_STOP_FRUGAL: _ClassVar[EarlyStop]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_FINISHED: _ClassVar[StopReason]
    STOP_REASON_CANCELLED: _ClassVar[StopReason]
    STOP_REASON_FAILED: _ClassVar[StopReason]
    STOP_REASON_BUDGET: _ClassVar[StopReason]
    STOP_REASON_DEADLINE: _ClassVar[StopReason]

class Termination(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TERMINATION_UNSPECIFIED: _ClassVar[Termination]
    TERMINATION_EOS: _ClassVar[Termination]
    TERMINATION_BOXED: _ClassVar[Termination]
    TERMINATION_LENGTH: _ClassVar[Termination]
    TERMINATION_BUDGET: _ClassVar[Termination]
    TERMINATION_DEGENERATE: _ClassVar[Termination]
    TERMINATION_DUPLICATE: _ClassVar[Termination]
    TERMINATION_PRUNED: _ClassVar[Termination]
    TERMINATION_CANCELLED: _ClassVar[Termination]
    TERMINATION_UNCLOSED: _ClassVar[Termination]
    TERMINATION_ERROR: _ClassVar[Termination]

class ChatRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAT_ROLE_UNSPECIFIED: _ClassVar[ChatRole]
    CHAT_ROLE_SYSTEM: _ClassVar[ChatRole]
    CHAT_ROLE_USER: _ClassVar[ChatRole]
    CHAT_ROLE_ASSISTANT: _ClassVar[ChatRole]
    CHAT_ROLE_TOOL: _ClassVar[ChatRole]
    CHAT_ROLE_PROBLEM: _ClassVar[ChatRole]

class Labels(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LABELS_UNSPECIFIED: _ClassVar[Labels]
    LABELS_OUTCOME: _ClassVar[Labels]
    LABELS_MONTE_CARLO: _ClassVar[Labels]
    LABELS_BINARY_SEARCH: _ClassVar[Labels]
ALGORITHM_UNSPECIFIED: Algorithm
ALGORITHM_GREEDY: Algorithm
ALGORITHM_MAJORITY: Algorithm
ALGORITHM_BEST_OF_N: Algorithm
ALGORITHM_BEAM: Algorithm
ALGORITHM_CHAIN: Algorithm
ALGORITHM_ADAPTIVE: Algorithm
ALGORITHM_DVTS: Algorithm
ALGORITHM_LOOKAHEAD: Algorithm
ALGORITHM_REBASE: Algorithm
ALGORITHM_PARTICLE: Algorithm
ALGORITHM_MCTS: Algorithm
ALGORITHM_AUTO: Algorithm
AGGREGATION_UNSPECIFIED: Aggregation
AGGREGATION_LAST: Aggregation
AGGREGATION_MIN: Aggregation
AGGREGATION_PROD: Aggregation
AGGREGATION_MEAN: Aggregation
VOTE_UNSPECIFIED: Vote
VOTE_NAIVE: Vote
VOTE_WEIGHTED: Vote
VOTE_MAJORITY: Vote
VOTE_CONFIDENCE: Vote
VOTE_TAIL_CONFIDENCE: Vote
VOTE_LOWEST_CONFIDENCE: Vote
EARLY_STOP_UNSPECIFIED: EarlyStop
EARLY_STOP_OFF: EarlyStop
EARLY_STOP_DECIDED: EarlyStop
EARLY_STOP_FRUGAL: EarlyStop
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_FINISHED: StopReason
STOP_REASON_CANCELLED: StopReason
STOP_REASON_FAILED: StopReason
STOP_REASON_BUDGET: StopReason
STOP_REASON_DEADLINE: StopReason
TERMINATION_UNSPECIFIED: Termination
TERMINATION_EOS: Termination
TERMINATION_BOXED: Termination
TERMINATION_LENGTH: Termination
TERMINATION_BUDGET: Termination
TERMINATION_DEGENERATE: Termination
TERMINATION_DUPLICATE: Termination
TERMINATION_PRUNED: Termination
TERMINATION_CANCELLED: Termination
TERMINATION_UNCLOSED: Termination
TERMINATION_ERROR: Termination
CHAT_ROLE_UNSPECIFIED: ChatRole
CHAT_ROLE_SYSTEM: ChatRole
CHAT_ROLE_USER: ChatRole
CHAT_ROLE_ASSISTANT: ChatRole
CHAT_ROLE_TOOL: ChatRole
CHAT_ROLE_PROBLEM: ChatRole
LABELS_UNSPECIFIED: Labels
LABELS_OUTCOME: Labels
LABELS_MONTE_CARLO: Labels
LABELS_BINARY_SEARCH: Labels

class SolveProblemRequest(_message.Message):
    __slots__ = ("problem", "algorithm", "beam_width", "expansion", "vote", "aggregation", "temperature", "top_p", "max_steps", "max_step_tokens", "max_tokens", "seed", "include_nodes", "top_k", "min_p", "lookahead_steps", "simulations", "exploration", "rebase_temperature", "iterations", "confidence", "generator_budget", "verifier_budget", "time_limit", "priority", "merge_duplicates", "early_stop", "history", "step_rule", "end_at_box", "thinking", "probe_every", "stop_when", "more_thinking", "stop_unsure", "answer_form", "text_form", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "tools", "tool_choice", "parallel_tool_calls")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    EXPANSION_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_NODES_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_STEPS_FIELD_NUMBER: _ClassVar[int]
    SIMULATIONS_FIELD_NUMBER: _ClassVar[int]
    EXPLORATION_FIELD_NUMBER: _ClassVar[int]
    REBASE_TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_BUDGET_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MERGE_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOP_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    STEP_RULE_FIELD_NUMBER: _ClassVar[int]
    END_AT_BOX_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    PROBE_EVERY_FIELD_NUMBER: _ClassVar[int]
    STOP_WHEN_FIELD_NUMBER: _ClassVar[int]
    MORE_THINKING_FIELD_NUMBER: _ClassVar[int]
    STOP_UNSURE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FORM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FORM_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    problem: str
    algorithm: Algorithm
    beam_width: int
    expansion: int
    vote: Vote
    aggregation: Aggregation
    temperature: float
    top_p: float
    max_steps: int
    max_step_tokens: int
    max_tokens: int
    seed: int
    include_nodes: bool
    top_k: int
    min_p: float
    lookahead_steps: int
    simulations: int
    exploration: float
    rebase_temperature: float
    iterations: int
    confidence: float
    generator_budget: int
    verifier_budget: int
    time_limit: _duration_pb2.Duration
    priority: int
    merge_duplicates: bool
    early_stop: EarlyStop
    history: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    step_rule: str
    end_at_box: bool
    thinking: str
    probe_every: int
    stop_when: str
    more_thinking: int
    stop_unsure: str
    answer_form: str
    text_form: str
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    tools: str
    tool_choice: str
    parallel_tool_calls: bool
    def __init__(self, problem: _Optional[str] = ..., algorithm: _Optional[_Union[Algorithm, str]] = ..., beam_width: _Optional[int] = ..., expansion: _Optional[int] = ..., vote: _Optional[_Union[Vote, str]] = ..., aggregation: _Optional[_Union[Aggregation, str]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., max_steps: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., include_nodes: bool = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., lookahead_steps: _Optional[int] = ..., simulations: _Optional[int] = ..., exploration: _Optional[float] = ..., rebase_temperature: _Optional[float] = ..., iterations: _Optional[int] = ..., confidence: _Optional[float] = ..., generator_budget: _Optional[int] = ..., verifier_budget: _Optional[int] = ..., time_limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., merge_duplicates: bool = ..., early_stop: _Optional[_Union[EarlyStop, str]] = ..., history: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., step_rule: _Optional[str] = ..., end_at_box: bool = ..., thinking: _Optional[str] = ..., probe_every: _Optional[int] = ..., stop_when: _Optional[str] = ..., more_thinking: _Optional[int] = ..., stop_unsure: _Optional[str] = ..., answer_form: _Optional[str] = ..., text_form: _Optional[str] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., tools: _Optional[str] = ..., tool_choice: _Optional[str] = ..., parallel_tool_calls: bool = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning_content", "more")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    role: ChatRole
    content: str
    reasoning_content: str
    more: str
    def __init__(self, role: _Optional[_Union[ChatRole, str]] = ..., content: _Optional[str] = ..., reasoning_content: _Optional[str] = ..., more: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("digest", "digest_before", "duration")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    digest: str
    digest_before: str
    duration: _duration_pb2.Duration
    def __init__(self, digest: _Optional[str] = ..., digest_before: _Optional[str] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "models", "kv_memory_bytes", "kv_blocks", "running_searches", "waiting_searches", "admitted_calls", "waiting_calls", "max_searches", "max_queue", "model_names")
    class ModelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class KvBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: KvBlocks
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[KvBlocks, _Mapping]] = ...) -> None: ...
    class ModelNamesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEARCHES_FIELD_NUMBER: _ClassVar[int]
    WAITING_SEARCHES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_CALLS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEARCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    version: str
    models: _containers.ScalarMap[str, str]
    kv_memory_bytes: int
    kv_blocks: _containers.MessageMap[str, KvBlocks]
    running_searches: int
    waiting_searches: int
    admitted_calls: int
    waiting_calls: int
    max_searches: int
    max_queue: int
    model_names: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[str] = ..., models: _Optional[_Mapping[str, str]] = ..., kv_memory_bytes: _Optional[int] = ..., kv_blocks: _Optional[_Mapping[str, KvBlocks]] = ..., running_searches: _Optional[int] = ..., waiting_searches: _Optional[int] = ..., admitted_calls: _Optional[int] = ..., waiting_calls: _Optional[int] = ..., max_searches: _Optional[int] = ..., max_queue: _Optional[int] = ..., model_names: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("live", "cached", "free")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    live: int
    cached: int
    free: int
    def __init__(self, live: _Optional[int] = ..., cached: _Optional[int] = ..., free: _Optional[int] = ...) -> None: ...

class SolveProblemResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: SearchResult
    def __init__(self, result: _Optional[_Union[SearchResult, _Mapping]] = ...) -> None: ...

class SolveProblemStreamRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: SolveProblemRequest
    def __init__(self, request: _Optional[_Union[SolveProblemRequest, _Mapping]] = ...) -> None: ...

class SolveProblemStreamResponse(_message.Message):
    __slots__ = ("started", "step", "candidate", "result")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    started: SearchStarted
    step: StepDone
    candidate: CandidateDone
    result: SearchResult
    def __init__(self, started: _Optional[_Union[SearchStarted, _Mapping]] = ..., step: _Optional[_Union[StepDone, _Mapping]] = ..., candidate: _Optional[_Union[CandidateDone, _Mapping]] = ..., result: _Optional[_Union[SearchResult, _Mapping]] = ...) -> None: ...

class SearchStarted(_message.Message):
    __slots__ = ("search_id", "configuration", "prompt_tokens")
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    configuration: SolveProblemRequest
    prompt_tokens: int
    def __init__(self, search_id: _Optional[str] = ..., configuration: _Optional[_Union[SolveProblemRequest, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("search_id", "depth", "scored", "kept", "best", "partial", "nodes", "search_duration", "blocks", "omitted_nodes")
    class BlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    SEARCH_DURATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_NODES_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    depth: int
    scored: int
    kept: _containers.RepeatedCompositeFieldContainer[SearchNode]
    best: Candidate
    partial: bool
    nodes: _containers.RepeatedCompositeFieldContainer[SearchNode]
    search_duration: _duration_pb2.Duration
    blocks: _containers.ScalarMap[str, int]
    omitted_nodes: int
    def __init__(self, search_id: _Optional[str] = ..., depth: _Optional[int] = ..., scored: _Optional[int] = ..., kept: _Optional[_Iterable[_Union[SearchNode, _Mapping]]] = ..., best: _Optional[_Union[Candidate, _Mapping]] = ..., partial: bool = ..., nodes: _Optional[_Iterable[_Union[SearchNode, _Mapping]]] = ..., search_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., blocks: _Optional[_Mapping[str, int]] = ..., omitted_nodes: _Optional[int] = ...) -> None: ...

class CandidateDone(_message.Message):
    __slots__ = ("search_id", "candidate")
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    candidate: Candidate
    def __init__(self, search_id: _Optional[str] = ..., candidate: _Optional[_Union[Candidate, _Mapping]] = ...) -> None: ...

class ScoredStep(_message.Message):
    __slots__ = ("text", "score", "thought_chars", "appended")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_CHARS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    text: str
    score: float
    thought_chars: int
    appended: str
    def __init__(self, text: _Optional[str] = ..., score: _Optional[float] = ..., thought_chars: _Optional[int] = ..., appended: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("node_id", "answer", "score", "multiplicity", "steps", "thought_tokens", "calls", "beside_calls")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MULTIPLICITY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_CALLS_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    answer: str
    score: float
    multiplicity: int
    steps: _containers.RepeatedCompositeFieldContainer[ScoredStep]
    thought_tokens: int
    calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    beside_calls: str
    def __init__(self, node_id: _Optional[int] = ..., answer: _Optional[str] = ..., score: _Optional[float] = ..., multiplicity: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[ScoredStep, _Mapping]]] = ..., thought_tokens: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., beside_calls: _Optional[str] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("answer", "certainty", "tokens")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    CERTAINTY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    answer: str
    certainty: float
    tokens: int
    def __init__(self, answer: _Optional[str] = ..., certainty: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class ProbedAnswer(_message.Message):
    __slots__ = ("answer", "share", "node_id")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    answer: str
    share: float
    node_id: int
    def __init__(self, answer: _Optional[str] = ..., share: _Optional[float] = ..., node_id: _Optional[int] = ...) -> None: ...

class SearchNode(_message.Message):
    __slots__ = ("node_id", "parent_id", "depth", "text", "score", "termination", "multiplicity", "path", "tokens", "log_probability", "thought_chars", "appended", "probe")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TERMINATION_FIELD_NUMBER: _ClassVar[int]
    MULTIPLICITY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_CHARS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    parent_id: int
    depth: int
    text: str
    score: float
    termination: Termination
    multiplicity: int
    path: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    log_probability: float
    thought_chars: int
    appended: str
    probe: Probe
    def __init__(self, node_id: _Optional[int] = ..., parent_id: _Optional[int] = ..., depth: _Optional[int] = ..., text: _Optional[str] = ..., score: _Optional[float] = ..., termination: _Optional[_Union[Termination, str]] = ..., multiplicity: _Optional[int] = ..., path: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., log_probability: _Optional[float] = ..., thought_chars: _Optional[int] = ..., appended: _Optional[str] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("generator_tokens", "generator_tree_tokens", "generated_tokens", "verifier_tokens", "verifier_tree_tokens", "nodes", "pruned", "duplicates", "peak_kv_bytes", "logical_blocks", "physical_blocks", "queue_duration", "search_duration", "generator_saved_tokens", "verifier_saved_tokens", "generator_peak_kv_bytes", "verifier_peak_kv_bytes", "first_step_duration", "stopped_paths", "stopped_tokens", "prompt_tokens", "appended_tokens", "probe_tokens", "drafted_tokens", "accepted_tokens")
    GENERATOR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_TREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_TREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PRUNED_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    PEAK_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DURATION_FIELD_NUMBER: _ClassVar[int]
    SEARCH_DURATION_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_SAVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_PEAK_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_PEAK_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_DURATION_FIELD_NUMBER: _ClassVar[int]
    STOPPED_PATHS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    APPENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    generator_tokens: int
    generator_tree_tokens: int
    generated_tokens: int
    verifier_tokens: int
    verifier_tree_tokens: int
    nodes: int
    pruned: int
    duplicates: int
    peak_kv_bytes: int
    logical_blocks: int
    physical_blocks: int
    queue_duration: _duration_pb2.Duration
    search_duration: _duration_pb2.Duration
    generator_saved_tokens: int
    verifier_saved_tokens: int
    generator_peak_kv_bytes: int
    verifier_peak_kv_bytes: int
    first_step_duration: _duration_pb2.Duration
    stopped_paths: int
    stopped_tokens: int
    prompt_tokens: int
    appended_tokens: int
    probe_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, generator_tokens: _Optional[int] = ..., generator_tree_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., verifier_tokens: _Optional[int] = ..., verifier_tree_tokens: _Optional[int] = ..., nodes: _Optional[int] = ..., pruned: _Optional[int] = ..., duplicates: _Optional[int] = ..., peak_kv_bytes: _Optional[int] = ..., logical_blocks: _Optional[int] = ..., physical_blocks: _Optional[int] = ..., queue_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., search_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., generator_saved_tokens: _Optional[int] = ..., verifier_saved_tokens: _Optional[int] = ..., generator_peak_kv_bytes: _Optional[int] = ..., verifier_peak_kv_bytes: _Optional[int] = ..., first_step_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., stopped_paths: _Optional[int] = ..., stopped_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., appended_tokens: _Optional[int] = ..., probe_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class SearchResult(_message.Message):
    __slots__ = ("search_id", "answer", "score", "stop_reason", "best", "candidates", "nodes", "usage", "configuration", "digests", "omitted_candidates", "omitted_nodes", "grader", "warnings", "probed")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OMITTED_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    OMITTED_NODES_FIELD_NUMBER: _ClassVar[int]
    GRADER_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    answer: str
    score: float
    stop_reason: StopReason
    best: Candidate
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    nodes: _containers.RepeatedCompositeFieldContainer[SearchNode]
    usage: Usage
    configuration: SolveProblemRequest
    digests: _containers.ScalarMap[str, str]
    omitted_candidates: int
    omitted_nodes: int
    grader: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    probed: ProbedAnswer
    def __init__(self, search_id: _Optional[str] = ..., answer: _Optional[str] = ..., score: _Optional[float] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., best: _Optional[_Union[Candidate, _Mapping]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[SearchNode, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., configuration: _Optional[_Union[SolveProblemRequest, _Mapping]] = ..., digests: _Optional[_Mapping[str, str]] = ..., omitted_candidates: _Optional[int] = ..., omitted_nodes: _Optional[int] = ..., grader: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., probed: _Optional[_Union[ProbedAnswer, _Mapping]] = ...) -> None: ...

class ScoreSolutionRequest(_message.Message):
    __slots__ = ("problem", "solutions", "history", "aggregation", "seed", "verifier_budget", "time_limit", "priority")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SOLUTIONS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    problem: str
    solutions: _containers.RepeatedCompositeFieldContainer[Solution]
    history: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    aggregation: Aggregation
    seed: int
    verifier_budget: int
    time_limit: _duration_pb2.Duration
    priority: int
    def __init__(self, problem: _Optional[str] = ..., solutions: _Optional[_Iterable[_Union[Solution, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., aggregation: _Optional[_Union[Aggregation, str]] = ..., seed: _Optional[int] = ..., verifier_budget: _Optional[int] = ..., time_limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class Solution(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, steps: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreSession(_message.Message):
    __slots__ = ("problem", "history", "max_nodes", "max_tokens", "seed", "verifier_budget", "time_limit", "priority")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_BUDGET_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    problem: str
    history: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    max_nodes: int
    max_tokens: int
    seed: int
    verifier_budget: int
    time_limit: _duration_pb2.Duration
    priority: int
    def __init__(self, problem: _Optional[str] = ..., history: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., max_nodes: _Optional[int] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., verifier_budget: _Optional[int] = ..., time_limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class SessionStep(_message.Message):
    __slots__ = ("node", "parent", "text")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    node: int
    parent: int
    text: str
    def __init__(self, node: _Optional[int] = ..., parent: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class ScoreStepsRequest(_message.Message):
    __slots__ = ("open", "steps", "release")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    open: ScoreSession
    steps: _containers.RepeatedCompositeFieldContainer[SessionStep]
    release: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Union[ScoreSession, _Mapping]] = ..., steps: _Optional[_Iterable[_Union[SessionStep, _Mapping]]] = ..., release: _Optional[_Iterable[int]] = ...) -> None: ...

class ScoreStepsResponse(_message.Message):
    __slots__ = ("scored", "result")
    SCORED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    scored: StepsScored
    result: ScoreSolutionResponse
    def __init__(self, scored: _Optional[_Union[StepsScored, _Mapping]] = ..., result: _Optional[_Union[ScoreSolutionResponse, _Mapping]] = ...) -> None: ...

class StepsScored(_message.Message):
    __slots__ = ("search_id", "scores")
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    scores: _containers.RepeatedCompositeFieldContainer[NodeScore]
    def __init__(self, search_id: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[NodeScore, _Mapping]]] = ...) -> None: ...

class NodeScore(_message.Message):
    __slots__ = ("node", "score", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: int
    score: float
    reason: str
    def __init__(self, node: _Optional[int] = ..., score: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class ScoreSolutionResponse(_message.Message):
    __slots__ = ("search_id", "solutions", "stop_reason", "usage", "scorer", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    SOLUTIONS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    solutions: _containers.RepeatedCompositeFieldContainer[SolutionScores]
    stop_reason: StopReason
    usage: Usage
    scorer: str
    digests: _containers.ScalarMap[str, str]
    def __init__(self, search_id: _Optional[str] = ..., solutions: _Optional[_Iterable[_Union[SolutionScores, _Mapping]]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., scorer: _Optional[str] = ..., digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SolutionScores(_message.Message):
    __slots__ = ("score", "step_scores", "reason")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    STEP_SCORES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    score: float
    step_scores: _containers.RepeatedCompositeFieldContainer[StepScore]
    reason: str
    def __init__(self, score: _Optional[float] = ..., step_scores: _Optional[_Iterable[_Union[StepScore, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class StepScore(_message.Message):
    __slots__ = ("score",)
    SCORE_FIELD_NUMBER: _ClassVar[int]
    score: float
    def __init__(self, score: _Optional[float] = ...) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ("problem", "history", "solutions", "labels", "continuations", "temperature", "max_steps", "max_step_tokens", "max_tokens", "seed", "golds", "time_limit", "priority", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    SOLUTIONS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GOLDS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    problem: str
    history: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    solutions: int
    labels: Labels
    continuations: int
    temperature: float
    max_steps: int
    max_step_tokens: int
    max_tokens: int
    seed: int
    golds: _containers.RepeatedScalarFieldContainer[str]
    time_limit: _duration_pb2.Duration
    priority: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, problem: _Optional[str] = ..., history: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., solutions: _Optional[int] = ..., labels: _Optional[_Union[Labels, str]] = ..., continuations: _Optional[int] = ..., temperature: _Optional[float] = ..., max_steps: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., golds: _Optional[_Iterable[str]] = ..., time_limit: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class RolloutResponse(_message.Message):
    __slots__ = ("steps", "result")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    steps: RolloutSteps
    result: RolloutResult
    def __init__(self, steps: _Optional[_Union[RolloutSteps, _Mapping]] = ..., result: _Optional[_Union[RolloutResult, _Mapping]] = ...) -> None: ...

class RolloutSteps(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[RolloutStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[RolloutStep, _Mapping]]] = ...) -> None: ...

class RolloutStep(_message.Message):
    __slots__ = ("parent", "text", "token_ids", "log_probabilities", "samples", "end", "answer", "right", "continuations", "continuations_right", "value", "continuation_answers")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    RIGHT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_RIGHT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probabilities: _containers.RepeatedScalarFieldContainer[float]
    samples: int
    end: str
    answer: str
    right: bool
    continuations: int
    continuations_right: int
    value: float
    continuation_answers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, parent: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probabilities: _Optional[_Iterable[float]] = ..., samples: _Optional[int] = ..., end: _Optional[str] = ..., answer: _Optional[str] = ..., right: bool = ..., continuations: _Optional[int] = ..., continuations_right: _Optional[int] = ..., value: _Optional[float] = ..., continuation_answers: _Optional[_Iterable[str]] = ...) -> None: ...

class RolloutResult(_message.Message):
    __slots__ = ("search_id", "prompt_token_ids", "stop_reason", "usage", "digests")
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEARCH_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    search_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_reason: StopReason
    usage: Usage
    digests: _containers.ScalarMap[str, str]
    def __init__(self, search_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., digests: _Optional[_Mapping[str, str]] = ...) -> None: ...
