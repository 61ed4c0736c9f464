"""Only pages of the dashboard with its token are answered, and no page can run foreign code."""

from pathlib import Path

import pytest
from support.dashboards import HOST, PORT, TOKEN, ask, dashboard, make_run

from peerage.errors import InputError
from peerage.ui.guard import Guard, check_address

OWN = f"http://{HOST}:{PORT}"


@pytest.fixture
def app(tmp_path: Path) -> Guard:
    make_run(tmp_path, "first")
    return dashboard(tmp_path).app()


def test_a_request_with_the_token_is_answered_with_a_strict_policy(app: Guard) -> None:
    answer = ask(app, "/")
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/api/list", "/static/list.js", "/run/first"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1]])
def test_nothing_is_served_without_the_token(app: Guard, path: str, token: str | None) -> None:
    answer = ask(app, path, token=token)
    assert (answer.status, b"first" in answer.body) == (403, False)


def test_the_token_moves_from_the_address_to_a_cookie(app: Guard) -> None:
    answer = ask(app, "/", {"token": TOKEN, "q": "a"}, token=None)
    assert answer.status == 307
    assert answer.headers["location"].endswith("/?q=a")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        f"evil.example:{PORT}",
        f"{HOST}:1",
        HOST,
        f"{HOST}:{PORT}:{PORT}",
        "",
        "[::1",
    ],
)
def test_other_names_of_this_machine_are_refused(app: Guard, host: str) -> None:
    assert ask(app, "/api/list", headers={"host": host}).status == 400


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]"])
def test_the_names_of_loopback_are_accepted(app: Guard, name: str) -> None:
    assert ask(app, "/api/list", headers={"host": f"{name}:{PORT}"}).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", f"http://{HOST}:1", "null", f"http://{HOST}.evil:{PORT}"]
)
def test_a_foreign_page_starts_nothing(app: Guard, tmp_path: Path, origin: str) -> None:
    form = {"recipe": "", "values": {"nodes": "4"}}
    answer = ask(app, "/api/start", method="POST", body=form, headers={"origin": origin})
    assert answer.status == 403
    assert not (tmp_path / ".ui").exists()


def test_an_action_needs_the_token_of_the_page_too(app: Guard, tmp_path: Path) -> None:
    for headers in ({"x-peerage-token": ""}, {"x-peerage-token": "x" * 20}):
        answer = ask(app, "/api/start", method="POST", body={}, headers=headers)
        assert answer.status == 403
    own = {"origin": OWN}
    assert ask(app, "/api/stop", method="POST", body={"path": "first"}, headers=own).status == 400


@pytest.mark.parametrize("path", ["/api/start", "/api/stop", "/api/resume", "/api/check"])
def test_actions_are_no_links(app: Guard, path: str) -> None:
    assert ask(app, path).status == 405


@pytest.mark.parametrize(
    "path", ["..", "../..", "first/../..", "/etc", "first//x", ".", "a\\b", "first/\0"]
)
@pytest.mark.parametrize("address", ["/api/run", "/api/graph", "/api/frames", "/api/details"])
def test_paths_outside_the_home_are_refused(app: Guard, address: str, path: str) -> None:
    assert ask(app, address, {"path": path}).status == 400


def test_a_link_out_of_the_home_is_refused(app: Guard, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    make_run(outside, "secret")
    (tmp_path / "link").symlink_to(outside)
    assert ask(app, "/api/run", {"path": "link/secret"}).status == 400
    download = {"path": "link/secret", "what": "experiment"}
    assert ask(app, "/download", download).status == 400
    assert "link" not in ask(app, "/api/list").text


def test_static_files_are_those_of_the_package_only(app: Guard) -> None:
    assert ask(app, "/static/../app.py").status == 404
    assert ask(app, "/static/style.css").status == 200


def test_names_are_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)<script>"
    make_run(tmp_path, name, label="<b>bold</b>", message="<img src=x>")
    app = dashboard(tmp_path).app()
    page = ask(app, f"/run/{name}").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert ask(app, "/api/list").headers["content-type"] == "application/json"


def test_other_addresses_need_a_long_token() -> None:
    check_address("127.0.0.1", None)
    check_address("0.0.0.0", "x" * 16)
    with pytest.raises(InputError, match=r"--host 0\.0\.0\.0 .* needs --token"):
        check_address("0.0.0.0", None)
    with pytest.raises(InputError, match="at least 16 ASCII characters, got 5"):
        check_address("127.0.0.1", "short")


def test_elsewhere_an_address_is_accepted_and_a_foreign_name_is_not(tmp_path: Path) -> None:
    served = dashboard(tmp_path)
    served.host = "0.0.0.0"
    app = served.app()
    assert ask(app, "/api/list", headers={"host": f"192.0.2.7:{PORT}"}).status == 200
    assert ask(app, "/api/list", headers={"host": f"evil.example:{PORT}"}).status == 400


def test_large_requests_are_refused(app: Guard) -> None:
    body = {"values": {"nodes": "1" * 200_000}}
    assert ask(app, "/api/check", method="POST", body=body).status == 413
