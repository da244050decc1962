"""Addresses of the project's own pages, below /admin/."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
