"""PostgreSQL stores no NUL: no question to it may have one."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api


@pytest.mark.django_db
def test_every_parameter_with_a_nul_is_a_400_that_names_it(api: Api) -> None:
    tried = {
        (path.replace("{id}", "1").replace("{request_id}", "r"), parameter["name"])
        for path, methods in api.ok("GET", "schema/?format=json")["paths"].items()
        for parameter in methods.get("get", {}).get("parameters", [])
        if parameter["in"] == "query"
    }
    passed = []
    for path, name in sorted(tried):
        answer = api("GET", f"{path.removeprefix('/api/admin/')}?{name}=a%00")
        if answer.status_code == 400:
            assert [one["field"] for one in answer.json()["errors"]] == [name], path
        else:
            passed.append((path, name, answer.status_code))
    assert passed == []
