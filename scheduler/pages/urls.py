"""Addresses of the project's own pages, below /admin/."""

from django.contrib import admin
from django.urls import path

from scheduler.pages import decisions, groups, overview, queue

view = admin.site.admin_view

urlpatterns = [
    path("figures/", view(overview.figures), name="overview_figures"),
    path("groups/", view(groups.groups), name="groups"),
    path("groups/add/", view(groups.add_group), name="group_add"),
    path("groups/figures/", view(groups.group_figures), name="group_figures"),
    path("queue/", view(queue.queue), name="queue"),
    path("queue/rows/", view(queue.rows), name="queue_rows"),
    path("queue/cancel/", view(queue.cancel), name="queue_cancel"),
    path("decisions/", view(decisions.decisions), name="decisions"),
    path("decisions/<str:request_id>/", view(decisions.decision), name="decision"),
]
