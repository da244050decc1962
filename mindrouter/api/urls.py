"""Addresses of the management API, beside those of ``scheduler.urls``."""

from __future__ import annotations

from django.urls import path, re_path
from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter

from mindrouter.api import cluster, people, reports, usage
from mindrouter.api.advice import AdviceView
from mindrouter.api.captures import CaptureViewSet
from mindrouter.api.docs import Docs
from mindrouter.api.queue import QueueViewSet
from mindrouter.api.shares import SharesView
from mindrouter.api.site_settings import SettingsHistory, SettingsView
from scheduler.views import StaffView


@extend_schema(exclude=True)
class NoSuchAddress(StaffView):
    """The rest below /api/admin/: not found, in the form of every other error here."""

    def get(self, request: Request, rest: str) -> Response:
        raise NotFound("There is no such address.")

    post = put = patch = delete = get


router = SimpleRouter(trailing_slash=False, use_regex_path=False)
router.register("groups", people.GroupViewSet, "api-group")
router.register("users", people.UserViewSet, "api-user")
router.register("quotas", people.QuotaViewSet, "api-quota")
router.register("boosts", people.BoostViewSet, "api-boost")
router.register("model-limits", people.ModelLimitsViewSet, "api-model-limits")
router.register("model-prices", people.ModelPriceViewSet, "api-model-prices")
router.register("api-keys", people.ApiKeyViewSet, "api-key")
router.register("backends", cluster.BackendViewSet, "api-backend")
router.register("backend-models", cluster.BackendModelViewSet, "api-backend-model")
router.register("nodes", cluster.NodeViewSet, "api-node")
router.register("aliases", cluster.AliasViewSet, "api-alias")
router.register("model-strategies", cluster.ModelStrategyViewSet, "api-model-strategy")
router.register("captures", CaptureViewSet, "api-capture")
router.register("queue", QueueViewSet, "api-queue")

urlpatterns = [
    *router.urls,
    path("settings", SettingsView.as_view(), name="api-settings"),
    path("settings/history", SettingsHistory.as_view(), name="api-settings-history"),
    path("shares", SharesView.as_view(), name="api-shares"),
    path("usage", usage.UsageView.as_view(), name="api-usage"),
    path("limits", usage.LimitsView.as_view(), name="api-limits"),
    path("reports/groups", reports.GroupReport.as_view(), name="api-report-groups"),
    path("reports/users", reports.UserReport.as_view(), name="api-report-users"),
    path("reports/causes", reports.CausesReport.as_view(), name="api-report-causes"),
    path("advice", AdviceView.as_view(), name="api-advice"),
    path("docs/", Docs.as_view(), name="api-docs"),
    re_path(r"^(?P<rest>.*)$", NoSuchAddress.as_view()),
]
