"""Nodes, backends and their models: configuration an admin makes, and status that polls write.

Configuration and status live in separate tables, so that a poll never counts as a change of
configuration and never overwrites an admin's edit.
"""

from __future__ import annotations

from typing import ClassVar

from django.conf import settings
from django.db import models
from django.utils import timezone

from audit.records import audited
from backends.crypto import EncryptedTextField
from backends.fields import NumbersField
from backends.validators import (
    validate_base_url,
    validate_gpu_indexes,
    validate_key,
    validate_mib,
    validate_model_names,
    validate_name,
    validate_priority,
    validate_seconds,
    validate_server_url,
)
from scheduler.core.jobs import CAPABILITIES


class Engine(models.TextChoices):
    AUTO = "auto", "detect"
    VLLM = "vllm", "vLLM"
    LLAMACPP = "llamacpp", "llama.cpp"
    OLLAMA = "ollama", "Ollama"
    SGLANG = "sglang", "SGLang"
    OPENAI = "openai", "OpenAI-compatible"


class State(models.TextChoices):
    """What the admin shows of a backend, from its settings and its last polls."""

    READY = "ready"
    DOWN = "down"  # refused, or not ready to serve
    UNANSWERED = "no answer"
    UNKNOWN = "not polled yet"
    DRAINING = "draining"
    PAUSED = "paused"
    DISABLED = "disabled"


class Strategy(models.TextChoices):
    SCORE = "score", "score: best total of points"
    AFFINITY = "affinity", "affinity: the same backend for the same conversation"
    ROUND_ROBIN = "round_robin", "round robin: each in turn"


def default_max_concurrent() -> int:
    return int(settings.VLLM_MAX_NUM_SEQS)


def default_max_queue() -> int:
    return int(settings.VLLM_MAX_QUEUE_DEPTH)


def default_connect_timeout() -> float:
    return float(settings.BACKEND_CONNECT_TIMEOUT)


def default_first_byte_timeout() -> float:
    return float(settings.BACKEND_FIRST_BYTE_TIMEOUT)


def default_chunk_timeout() -> float:
    return float(settings.BACKEND_CHUNK_TIMEOUT)


def default_poll_interval() -> float:
    return float(settings.BACKEND_POLL_INTERVAL)


class Node(models.Model):
    """A machine with GPUs."""

    name = models.CharField(max_length=100, unique=True, validators=[validate_name])
    telemetry_url = models.CharField(
        "telemetry URL",
        max_length=500,
        blank=True,
        validators=[validate_server_url],
        help_text="A DCGM exporter (http://gpu-1:9400/metrics) or a JSON endpoint "
        "(http://gpu-1:8007/gpu-info). Empty: the GPUs are not polled.",
    )
    telemetry_key = EncryptedTextField(
        null=True,
        blank=True,
        validators=[validate_key],
        help_text="Sent as X-Sidecar-Key and as Bearer token. Stored encrypted, never shown.",
    )
    history = audited(excluded_fields=["telemetry_key"])

    class Meta:
        ordering: ClassVar = ["name"]

    def __str__(self) -> str:
        return self.name


class NodeStatus(models.Model):
    """What the last poll of a node said. Null is unknown, never 0."""

    node = models.OneToOneField(Node, on_delete=models.CASCADE, related_name="status")
    claimed_until = models.DateTimeField(null=True, help_text="A poll is under way until then.")
    attempted_at = models.DateTimeField(null=True, help_text="Start of the last poll.")
    observed_at = models.DateTimeField(null=True, help_text="Start of the last successful poll.")
    error = models.TextField(blank=True)
    gpus = models.JSONField(default=list)

    class Meta:
        verbose_name_plural = "node statuses"

    def __str__(self) -> str:
        return f"status of {self.node}"


class Backend(models.Model):
    """One LLM server."""

    name = models.CharField(max_length=100, unique=True, validators=[validate_name])
    base_url = models.CharField(
        "base URL",
        max_length=500,
        validators=[validate_base_url],
        help_text="For example http://gpu-1:8000; may end in /v1.",
    )
    engine = models.CharField(
        max_length=10,
        choices=Engine,
        default=Engine.AUTO,
        help_text="Found out at each poll unless chosen here.",
    )
    api_key = EncryptedTextField(
        "API key",
        null=True,
        blank=True,
        validators=[validate_key],
        help_text="The backend's own key, sent as Bearer token. Stored encrypted, never shown.",
    )
    max_concurrent = models.PositiveIntegerField(
        default=default_max_concurrent, help_text="Requests it runs at once (its slots)."
    )
    max_queue = models.PositiveIntegerField(
        default=default_max_queue,
        help_text="Requests that may wait for it. 0: served if a slot is free, else refused.",
    )
    priority = models.FloatField(
        default=0,
        validators=[validate_priority],
        help_text="Points: each unit adds 10 to its score. May be negative.",
    )
    enabled = models.BooleanField(default=True)
    draining = models.BooleanField(
        default=False,
        help_text="Finishes what runs, gets nothing new, and is disabled once nothing runs.",
    )
    paused = models.BooleanField(
        default=False,
        help_text="Finishes what runs and gets nothing new until it is resumed. Requests that only "
        "paused backends can serve wait, at most as long as any may wait.",
    )
    connect_timeout = models.FloatField(
        default=default_connect_timeout,
        validators=[validate_seconds],
        help_text="Seconds for opening a connection.",
    )
    first_byte_timeout = models.FloatField(
        default=default_first_byte_timeout,
        validators=[validate_seconds],
        help_text="Seconds from sending a request to the first byte of its answer.",
    )
    chunk_timeout = models.FloatField(
        default=default_chunk_timeout,
        validators=[validate_seconds],
        help_text="Seconds between two parts of an answer.",
    )
    poll_interval = models.FloatField(
        default=default_poll_interval,
        validators=[validate_seconds],
        help_text="Seconds between two polls, at least about one.",
    )
    node = models.ForeignKey(
        Node, on_delete=models.SET_NULL, null=True, blank=True, related_name="backends"
    )
    gpu_indexes = NumbersField(
        "GPUs",
        null=True,
        blank=True,
        validators=[validate_gpu_indexes],
        help_text="Numbers of the node's GPUs that it uses, such as 0, 1. Empty: all of them. "
        "Their memory counts for models that are not loaded yet.",
    )
    history = audited(excluded_fields=["api_key"])

    class Meta:
        ordering: ClassVar = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def state(self) -> State:
        if not self.enabled:
            return State.DISABLED
        status = getattr(self, "status", None)
        found: State = status.state if status else State.UNKNOWN
        if found != State.READY:
            return found
        return State.DRAINING if self.draining else State.PAUSED if self.paused else found


class BackendModel(models.Model):
    """A model on a backend: found there by a poll, named by hand, or both.

    ``vision`` … ``moderation`` and ``context_length``, ``vram_mib`` are set by hand and win over
    the ``detected_…`` ones (yes, no, or null for "as detected").
    """

    backend = models.ForeignKey(Backend, on_delete=models.CASCADE, related_name="models")
    name = models.CharField(max_length=300)
    by_hand = models.BooleanField(
        "keep", default=True, help_text="Offered even when the backend does not list it."
    )
    listed = models.BooleanField(default=False, editable=False)
    vision = models.BooleanField(null=True, blank=True)
    tools = models.BooleanField(null=True, blank=True)
    json = models.BooleanField("JSON", null=True, blank=True)
    embeddings = models.BooleanField(null=True, blank=True)
    rerank = models.BooleanField(null=True, blank=True, help_text="Reranks and scores texts.")
    transcription = models.BooleanField(null=True, blank=True, help_text="Audio to text.")
    speech = models.BooleanField(null=True, blank=True, help_text="Text to audio.")
    images = models.BooleanField(null=True, blank=True, help_text="Makes images.")
    moderation = models.BooleanField(null=True, blank=True, help_text="Judges what is unwanted.")
    context_length = models.PositiveIntegerField(null=True, blank=True, help_text="Tokens.")
    vram_mib = models.FloatField(
        "VRAM",
        null=True,
        blank=True,
        validators=[validate_mib],
        help_text="MiB that it needs to be loaded.",
    )
    detected_vision = models.BooleanField(null=True, editable=False)
    detected_tools = models.BooleanField(null=True, editable=False)
    detected_json = models.BooleanField(null=True, editable=False)
    detected_embeddings = models.BooleanField(null=True, editable=False)
    detected_rerank = models.BooleanField(null=True, editable=False)
    detected_transcription = models.BooleanField(null=True, editable=False)
    detected_speech = models.BooleanField(null=True, editable=False)
    detected_images = models.BooleanField(null=True, editable=False)
    detected_moderation = models.BooleanField(null=True, editable=False)
    detected_context_length = models.PositiveIntegerField(null=True, editable=False)
    detected_vram_mib = models.FloatField(null=True, editable=False)
    history = audited(
        excluded_fields=[
            "listed",
            *(f"detected_{name}" for name in (*CAPABILITIES, "context_length", "vram_mib")),
        ]
    )

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["backend", "name"], name="model_once_per_backend")
        ]

    def __str__(self) -> str:
        return f"{self.name} on {self.backend}"


class BackendStatus(models.Model):
    """What the last polls of a backend said. Null is unknown, never 0; each age is shown."""

    backend = models.OneToOneField(Backend, on_delete=models.CASCADE, related_name="status")
    claimed_until = models.DateTimeField(null=True, help_text="A poll is under way until then.")
    fingerprint = models.CharField(
        max_length=64, blank=True, help_text="Of the address, engine and key that are polled."
    )
    attempted_at = models.DateTimeField(null=True, help_text="Start of the last poll.")
    answered_at = models.DateTimeField(
        null=True, help_text="Start of the last poll whose outcome, good or bad, is in here."
    )
    observed_at = models.DateTimeField(null=True, help_text="Start of the last successful poll.")
    reachable = models.BooleanField(null=True)
    error = models.TextField(blank=True)
    detected_engine = models.CharField(max_length=10, choices=Engine, blank=True)
    version = models.CharField(max_length=100, blank=True)
    running = models.PositiveIntegerField(null=True)
    waiting = models.PositiveIntegerField(null=True)
    slots = models.PositiveIntegerField(null=True)
    kv_use = models.FloatField(null=True, help_text="0..1, of the KV cache.")
    gpu_use = models.FloatField(null=True, help_text="0..1, mean over its GPUs.")
    sleeping = models.BooleanField(null=True)
    loaded_models = models.JSONField(null=True, help_text="{name: VRAM in MiB or null}")
    vram_total_mib = models.FloatField(null=True)
    vram_free_mib = models.FloatField(null=True)
    missing_models = models.JSONField(
        default=dict, help_text="{name: good polls in a row that no longer listed it}"
    )

    class Meta:
        verbose_name_plural = "backend statuses"

    def __str__(self) -> str:
        return f"status of {self.backend}"

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the last successful poll began, or None."""
        if self.observed_at is None:
            return None
        return (timezone.now() - self.observed_at).total_seconds()

    @property
    def state(self) -> State:
        """What the last poll says, apart from what an admin has set."""
        if self.answered_at is None:
            return State.UNKNOWN
        return {True: State.READY, False: State.DOWN, None: State.UNANSWERED}[self.reachable]


class GpuSample(models.Model):
    """One GPU at one poll of its node. Null is unknown, never 0.

    The node is kept by number and by name, without a foreign key: samples go by their age, and a
    node is deleted without them.
    """

    node_id = models.BigIntegerField()
    node = models.CharField(max_length=100)
    gpu = models.CharField(max_length=20, help_text="Its index on the node.")
    at = models.DateTimeField(db_index=True)
    memory_total_mib = models.FloatField(null=True)
    memory_used_mib = models.FloatField(null=True)
    utilization = models.FloatField(null=True, help_text="0..1")
    temperature_celsius = models.FloatField(null=True)
    power_watts = models.FloatField(null=True)

    class Meta:
        ordering: ClassVar = ["-at", "-id"]
        indexes: ClassVar = [models.Index(fields=["node_id", "at"], name="gpu_samples_of_node")]

    def __str__(self) -> str:
        return f"GPU {self.gpu} of {self.node} at {self.at:%Y-%m-%d %H:%M:%S}"


class BackendSample(models.Model):
    """One backend at one poll. Null is unknown, never 0; kept like a ``GpuSample``."""

    backend_id = models.BigIntegerField()
    backend = models.CharField(max_length=100)
    at = models.DateTimeField(db_index=True)
    reachable = models.BooleanField(null=True)
    running = models.PositiveIntegerField(null=True)
    waiting = models.PositiveIntegerField(null=True)
    kv_use = models.FloatField(null=True, help_text="0..1")
    gpu_use = models.FloatField(null=True, help_text="0..1")
    vram_total_mib = models.FloatField(null=True)
    vram_free_mib = models.FloatField(null=True)

    class Meta:
        ordering: ClassVar = ["-at", "-id"]
        indexes: ClassVar = [models.Index(fields=["backend_id", "at"], name="samples_of_backend")]

    def __str__(self) -> str:
        return f"{self.backend} at {self.at:%Y-%m-%d %H:%M:%S}"


class Alias(models.Model):
    """Another name for a model: the first target that a backend has is used."""

    name = models.CharField(max_length=300, unique=True)
    targets = models.JSONField(
        validators=[validate_model_names], help_text="List of model names, best first."
    )
    history = audited()

    class Meta:
        ordering: ClassVar = ["name"]
        verbose_name_plural = "aliases"

    def __str__(self) -> str:
        return self.name


class ModelStrategy(models.Model):
    """How a backend is chosen for one model. Models without a row are placed by score."""

    model_name = models.CharField(max_length=300, unique=True)
    strategy = models.CharField(max_length=12, choices=Strategy, default=Strategy.SCORE)
    history = audited()

    class Meta:
        ordering: ClassVar = ["model_name"]
        verbose_name_plural = "model strategies"

    def __str__(self) -> str:
        return f"{self.model_name}: {self.strategy}"
