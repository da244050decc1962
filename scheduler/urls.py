"""Addresses of the management API, below /api/admin/."""

from django.urls import path

from scheduler import views

urlpatterns = [
    path("decisions", views.DecisionList.as_view(), name="api-decisions"),
    path("decisions/<str:request_id>", views.DecisionDetail.as_view(), name="api-decision"),
    path("scheduler/stats", views.SchedulerStats.as_view(), name="api-stats"),
    path("schema/", views.Schema.as_view(), name="api-schema"),
]
