"""Addresses below /account/."""

from django.urls import path

from scheduler.pages import account

urlpatterns = [
    path("", account.overview, name="account"),
    path("figures/", account.figures, name="account_figures"),
    path("login/", account.sign_in, name="account_login"),
    path("logout/", account.sign_out, name="account_logout"),
    path("password/", account.change_password, name="account_password"),
    path("keys/", account.keys, name="account_keys"),
    path("keys/<int:pk>/revoke/", account.revoke_key, name="account_key_revoke"),
    path("requests/", account.requests, name="account_requests"),
    path("requests/<str:request_id>/", account.one_request, name="account_request"),
    path("clients/", account.clients, name="account_clients"),
]
