"""Addresses of the management API."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
