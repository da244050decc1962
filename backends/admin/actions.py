"""What an admin does to backends: as actions on the list, and as buttons on a backend's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.views.decorators.http import require_POST
from unfold.admin import ModelAdmin
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget

from backends.admin.showing import status_of
from backends.catalog import effective_engine
from backends.life import ACTIONS, change
from backends.models import Backend, Engine
from backends.services import detect_engines, probe_backends
from backends.trial import PROMPT, Trial, offered_models, try_backend, try_first_models


class TrialForm(forms.Form):
    """Which model to ask, and what."""

    model = forms.ChoiceField(widget=UnfoldAdminSelectWidget)
    prompt = forms.CharField(
        max_length=4000, initial=PROMPT, widget=UnfoldAdminTextareaWidget(attrs={"rows": 3})
    )

    def __init__(self, models: dict[str, str], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["model"].choices = [  # type: ignore[attr-defined]
            (name, f"{name} ({purpose})" if purpose else name) for name, purpose in models.items()
        ]


class LifeActions(ModelAdmin):  # type: ignore[misc]
    """The actions of ``BackendAdmin``."""

    actions = (
        "enable",
        "disable",
        "drain",
        "pause",
        "resume",
        "poll_now",
        "detect",
        "test",
    )
    #: Actions that have a button on a backend's page, and their texts there.
    buttons = (
        ("enable", "Enable"),
        ("disable", "Disable"),
        ("drain", "Drain"),
        ("pause", "Pause"),
        ("resume", "Resume"),
        ("poll_now", "Poll now"),
        ("detect", "Detect engine"),
    )

    # ---- on the list

    @admin.action(description="Enable", permissions=["change"])
    def enable(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._change(request, backends, "enable")

    @admin.action(description="Disable: nothing new, and no polls", permissions=["change"])
    def disable(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._change(request, backends, "disable")

    @admin.action(
        description="Drain: finish what runs, nothing new, then disable", permissions=["change"]
    )
    def drain(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._change(request, backends, "drain")

    @admin.action(description="Pause: nothing new until resumed", permissions=["change"])
    def pause(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._change(request, backends, "pause")

    @admin.action(description="Resume: end pause and draining", permissions=["change"])
    def resume(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._change(request, backends, "resume")

    @admin.action(description="Poll now", permissions=["view"])
    def poll_now(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        self._poll(request, list(backends.values_list("pk", flat=True)))

    @admin.action(description="Detect the engine anew", permissions=["change"])
    def detect(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        found = list(backends.select_related("status"))
        chosen = [backend for backend in found if backend.engine != Engine.AUTO]
        self._poll(request, [b.pk for b in found if b.engine == Engine.AUTO], anew=True)
        results = detect_engines(chosen)
        for backend in chosen:
            self.message_user(request, *_comparison(backend, results[backend.pk].engine))

    @admin.action(description="Test with a real request to the first model", permissions=["change"])
    def test(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        chosen = list(backends.select_related("status").prefetch_related("models"))
        for trial in try_first_models(chosen):
            level = messages.SUCCESS if trial.succeeded else messages.ERROR
            self.message_user(request, _told(trial), level)

    def _poll(self, request: HttpRequest, ids: Sequence[int], *, anew: bool = False) -> None:
        probe_backends(ids, anew=anew)
        for backend in self.get_queryset(request).filter(pk__in=ids):
            self.message_user(request, *self.outcome(backend))

    def _change(self, request: HttpRequest, backends: QuerySet[Backend], action: str) -> None:
        changed = change(backends, action)
        for backend in changed:
            self.log_change(request, backend, [{"changed": {"fields": list(ACTIONS[action])}}])
        names = ", ".join(backend.name for backend in changed)
        self.message_user(request, f"{action.capitalize()}: {names or 'all were so already'}.")
        if action == "resume":
            self._tell_disabled(request, backends)

    def _tell_disabled(self, request: HttpRequest, backends: QuerySet[Backend]) -> None:
        names = ", ".join(backends.filter(enabled=False).values_list("name", flat=True))
        if names:
            text = f"Disabled, and so it stays until it is enabled: {names}."
            self.message_user(request, text, messages.WARNING)

    def outcome(self, backend: Any) -> tuple[str, int]:
        """A message on what the last poll came to, and its level."""
        status = status_of(backend)
        if status.answered_at is None:
            return f"{backend.name}: no answer yet; it is being polled.", messages.WARNING
        if status.reachable:
            engine = Engine(effective_engine(backend.engine, status.detected_engine)).label
            found = f"{engine} {status.version}".strip()
            return f"{backend.name}: {found}, models: {backend.offered_models}.", messages.SUCCESS
        return f"{backend.name}: {status.state.value}. {status.error}", messages.WARNING

    # ---- on their own addresses

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        own = [
            path("all/", view(require_POST(self.all_view)), name="backends_backend_all"),
            path("<int:pk>/act/", view(require_POST(self.act_view)), name="backends_backend_act"),
            path("<int:pk>/test/", view(self.test_view), name="backends_backend_test"),
        ]
        return [*own, *super().get_urls()]

    def all_view(self, request: HttpRequest) -> HttpResponse:
        """Pause or resume every backend, whatever is selected or filtered on the list."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        action = request.POST.get("action")
        if action not in ("pause", "resume"):
            raise Http404
        # What is draining goes on draining: that was said of one backend, not of all.
        rows = Backend.objects.filter(paused=action == "resume")
        for backend in rows:
            backend.paused = action == "pause"
            backend._change_reason = f"{action} all"  # type: ignore[attr-defined]
            backend.save(update_fields=["paused"])
            self.log_change(request, backend, [{"changed": {"fields": ["paused"]}}])
        verb = "Paused" if action == "pause" else "Resumed"
        self.message_user(request, f"{verb}: {len(rows)} backends.")
        return redirect("admin:backends_backend_changelist")

    def act_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """One of ``buttons``, for one backend."""
        action = request.POST.get("action", "")
        allowed = self.get_actions(request)
        if action not in dict(self.buttons):
            raise Http404
        if action not in allowed:
            raise PermissionDenied
        backends = self.get_queryset(request).filter(pk=pk)
        if not backends:
            raise Http404
        getattr(self, action)(request, backends)
        return redirect("admin:backends_backend_change", pk)

    def test_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """A form for a real request to this backend, and what came of it."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        backend = self.get_queryset(request).prefetch_related("models").filter(pk=pk).first()
        if backend is None:
            raise Http404
        models = offered_models(backend)
        form = TrialForm(models, request.POST or None)
        trial = None
        if request.method == "POST" and form.is_valid():
            trial = try_backend(backend, form.cleaned_data["model"], form.cleaned_data["prompt"])
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": f"Test {backend.name}",
            "backend": backend,
            "models": models,
            "form": form,
            "trial": trial,
        }
        return TemplateResponse(request, "backends/test.html", context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        allowed = self.get_actions(request)
        own = {"buttons": [(name, text) for name, text in self.buttons if name in allowed]}
        response: HttpResponse = super().change_view(
            request, object_id, form_url, own | (extra_context or {})
        )
        return response


def _comparison(backend: Backend, detected: str) -> tuple[str, int]:
    """What to say of a backend whose engine was chosen by hand."""
    chosen = Engine(backend.engine).label
    if not detected:
        return f"{backend.name}: nothing was found out; {chosen} is chosen.", messages.WARNING
    found = Engine(detected).label
    if detected == backend.engine:
        return f"{backend.name}: {found}, as chosen.", messages.SUCCESS
    return f"{backend.name}: found {found}, but {chosen} is chosen.", messages.WARNING


def _told(trial: Trial) -> str:
    begin = f"{trial.backend}, {trial.model_name or 'no model'}, {trial.seconds:.1f} s"
    return f"{begin}: {trial.answer or trial.error}"
