"""Addresses of the project's own pages, below /admin/."""

from django.contrib import admin
from django.urls import path

from scheduler.pages import (
    advice,
    decisions,
    groups,
    history,
    limits,
    overview,
    queue,
    reports,
    what_if,
)

view = admin.site.admin_view

urlpatterns = [
    path("figures/", view(overview.figures), name="overview_figures"),
    path("charts/", view(overview.charts), name="overview_charts"),
    path("groups/", view(groups.groups), name="groups"),
    path("groups/add/", view(groups.add_group), name="group_add"),
    path("groups/figures/", view(groups.group_figures), name="group_figures"),
    path("groups/boosts/<int:pk>/end/", view(groups.end_boost), name="boost_end"),
    path("queue/", view(queue.queue), name="queue"),
    path("queue/rows/", view(queue.rows), name="queue_rows"),
    path("queue/cancel/", view(queue.cancel), name="queue_cancel"),
    path("what-if/", view(what_if.what_ifs), name="what_ifs"),
    path("what-if/try/", view(what_if.try_weights), name="what_if_try"),
    path("what-if/<int:pk>/", view(what_if.one_what_if), name="what_if"),
    path("what-if/<int:pk>/progress/", view(what_if.progress), name="what_if_progress"),
    path("what-if/<int:pk>/again/", view(what_if.start_again), name="what_if_again"),
    path("what-if/<int:pk>/save/", view(what_if.save), name="what_if_save"),
    path("what-if/<int:pk>/delete/", view(what_if.delete), name="what_if_delete"),
    path("reports/", view(reports.report), name="reports"),
    path("reports/<str:what>.<str:form>", view(reports.export), name="report_export"),
    path("limits/", view(limits.limits), name="limits"),
    path("advice/", view(advice.advice), name="advice"),
    path("history/", view(history.history), name="history"),
    path("history.<str:form>", view(history.export), name="history_export"),
    path("history/<str:kind>/<int:history_id>/", view(history.revert), name="history_revert"),
    path("decisions/", view(decisions.decisions), name="decisions"),
    path("decisions/<str:request_id>/", view(decisions.decision), name="decision"),
    path("decisions/<str:request_id>/prompt/", view(decisions.prompt), name="decision_prompt"),
]
