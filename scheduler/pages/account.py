"""/account/: the own share, limits, waits, keys and requests, for everybody who has signed in."""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.auth import views as auth
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import AuthenticationForm
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.template.response import TemplateResponse
from django.urls import reverse, reverse_lazy
from django.utils.dateparse import parse_datetime
from django.views.decorators.http import (
    require_GET,
    require_http_methods,
    require_POST,
    require_safe,
)
from unfold.forms import AuthenticationForm as ThemedForm

from accounts.captures import captured_keys
from accounts.forms import OwnKeyForm, OwnPasswordForm
from accounts.models import ApiKey, User
from backends.models import Backend
from scheduler import account, explain, explain_share, services
from scheduler.models import Decision, Outcome
from scheduler.pages.decisions import explained
from scheduler.snippets import KEY, snippets

PAGE_ROWS = 50
MOST_MODELS = 200  # on one page

signed_in = login_required(login_url="account_login")


# ---- signing in and out


class SignInForm(ThemedForm):  # type: ignore[misc]
    """The admin's form, for those without a staff account too."""

    error_messages = AuthenticationForm.error_messages

    def confirm_login_allowed(self, user: User) -> None:
        AuthenticationForm.confirm_login_allowed(self, user)


class SignIn(auth.LoginView):
    """One page for all; staff go on to the overview, others to their account."""

    form_class = SignInForm
    template_name = "account/login.html"
    redirect_authenticated_user = True

    def get_default_redirect_url(self) -> str:
        return home_of(self.request)

    def get_context_data(self, **more: Any) -> dict[str, Any]:
        context = {**admin.site.each_context(self.request), "title": "Sign in"}
        context["app_path"] = self.request.get_full_path()
        return super().get_context_data(**context, **more)


class ChangePassword(auth.PasswordChangeView):
    """The own password."""

    form_class = OwnPasswordForm
    template_name = "account/password.html"
    success_url = reverse_lazy("account")

    def form_valid(self, form: Any) -> HttpResponse:
        messages.success(self.request, "Your password was changed.")
        return super().form_valid(form)

    def get_context_data(self, **more: Any) -> dict[str, Any]:
        return super().get_context_data(**_frame(self.request, "Change password"), **more)


sign_in = SignIn.as_view()
sign_out = auth.LogoutView.as_view(next_page="account_login")
change_password = signed_in(ChangePassword.as_view())


def home(request: HttpRequest) -> HttpResponse:
    """The site's root."""
    return redirect(home_of(request))


def home_of(request: HttpRequest) -> str:
    is_plain = request.user.is_authenticated and not request.user.is_staff
    return reverse("account" if is_plain else "admin:index")


# ---- the share


@signed_in
@require_safe
def overview(request: HttpRequest) -> HttpResponse:
    """Share, limits and waits."""
    user = _user(request)
    context = {
        **_frame(request, "My share"),
        **_captured(user),
        **_live(user),
        "waits": account.waits_of(user),
        "totals": account.totals_of(user),
        "days": account.DAYS,
    }
    return TemplateResponse(request, "account/overview.html", context)


@signed_in
@require_GET
def figures(request: HttpRequest) -> HttpResponse:
    """What changes from moment to moment, for htmx."""
    return TemplateResponse(request, "account/_live.html", _live(_user(request)))


def _live(user: User) -> dict[str, Any]:
    view = services.live()
    known = account.snapshot()
    standing = account.standing_of(user, view, known)
    return {
        "live": view,
        "standing": standing,
        "sentences": [] if standing is None else explain_share.sentences(standing),
        "limits": account.limits_of(user, known),
    }


# ---- keys


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def keys(request: HttpRequest) -> HttpResponse:
    """The own keys; a POST makes one, which is shown in its answer and nowhere else."""
    user = _user(request)
    form = OwnKeyForm(request.POST if request.method == "POST" else None, user=user)
    if form.is_bound and form.is_valid():
        key, secret = form.save_key()
        context = {**_frame(request, "Your new key"), "api_key": key, "secret": secret}
        answer = TemplateResponse(request, "account/key_created.html", context)
        answer["Cache-Control"] = "no-store"
        return answer
    context = {
        **_frame(request, "My keys"),
        **_captured(user),
        "form": form,
        "keys": ApiKey.objects.filter(user=user).select_related("use").order_by("-enabled", "name"),
    }
    return TemplateResponse(request, "account/keys.html", context)


@signed_in
@require_POST
def revoke_key(request: HttpRequest, pk: int) -> HttpResponse:
    """Refuse a key from now on; somebody else's is not found."""
    key = get_object_or_404(ApiKey, pk=pk, user=_user(request))
    if key.enabled:
        key.enabled = False
        key._change_reason = "revoked by its owner"  # type: ignore[attr-defined]
        key.save(update_fields=["enabled"])
    messages.success(request, f"The key {key.name} was revoked.")
    return redirect("account_keys")


# ---- requests


@signed_in
@require_safe
def requests(request: HttpRequest) -> HttpResponse:
    """The own requests, newest first, each with its explanation."""
    outcome = request.GET.get("outcome", "")
    outcome = outcome if outcome in Outcome.values else ""
    before = _moment(request.GET.get("before", ""))
    rows = account.requests_of(_user(request))
    if outcome:
        rows = rows.filter(outcome=outcome)
    if before is not None:
        rows = rows.filter(arrived_at__lt=before)
    found = list(rows[: PAGE_ROWS + 1])
    page, has_more = found[:PAGE_ROWS], len(found) > PAGE_ROWS
    names = {str(pk): name for pk, name in Backend.objects.values_list("pk", "name")}
    query = {"outcome": outcome, "before": page[-1].arrived_at.isoformat() if has_more else ""}
    context = {
        **_frame(request, "My requests"),
        **_captured(_user(request)),
        "rows": [(one, explain.sentence(services.case_of(one, names))) for one in page],
        "outcome": outcome,
        "outcomes": Outcome.values,
        "older": "?" + urlencode({k: v for k, v in query.items() if v}) if has_more else "",
        "is_later_page": before is not None,
    }
    return TemplateResponse(request, "account/requests.html", context)


@signed_in
@require_safe
def one_request(request: HttpRequest, request_id: str) -> HttpResponse:
    """One of the own requests; somebody else's is not found."""
    own = Decision.objects.filter(user_id=_user(request).pk)
    record = get_object_or_404(own, request_id=request_id)
    context = {**_frame(request, f"Request {record.request_id}"), **explained(record)}
    return TemplateResponse(request, "pages/decision.html", context)


# ---- clients


@signed_in
@require_safe
def clients(request: HttpRequest) -> HttpResponse:
    """Ready code for each client, with this site's address and one of the user's models."""
    models = account.models_of(_user(request), account.snapshot())
    asked = request.GET.get("model", "")
    model = asked if asked in models else next(iter(models), "")
    context = {
        **_frame(request, "Connect a client"),
        "models": models[:MOST_MODELS],
        "model": model,
        "placeholder": KEY,
        "snippets": snippets(request.build_absolute_uri("/").rstrip("/"), model or "MODEL"),
    }
    return TemplateResponse(request, "account/clients.html", context)


# ---- common


def _frame(request: HttpRequest, title: str) -> dict[str, Any]:
    request.current_app = admin.site.name
    return {
        **admin.site.each_context(request),
        "title": title,
        "has_permission": True,  # to see the frame
        "sidebar_navigation": admin.site.get_sidebar_list(request),  # type: ignore[attr-defined]
        "sidebar_show_search": _user(request).is_staff,  # it searches the admin
    }


def _captured(user: User) -> dict[str, Any]:
    """What the owner is told of keys whose prompts are stored."""
    return {"captured_keys": captured_keys().filter(user=user).select_related("user")}


def _user(request: HttpRequest) -> User:
    return cast("User", request.user)


def _moment(text: str) -> datetime | None:
    try:
        found = parse_datetime(text)
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None
