"""Lines of the gateway's file of tokens."""

import pytest

from penstock_services.gateway.core.access import parse_tokens


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("sha256:12 roles=read", "64 hexadecimal digits"),
        ("{hash} roles=root", "'root' is not a role"),
        ("{hash}", "roles="),
        ("{hash} roles=submit", "tenant="),
        ("{hash} roles=submit tenant=shared", "all tenants' secrets"),
        ("{hash} roles=node", "node="),
        ("{hash} roles=submit tenant=a/../b\x00", "tenant"),
        ("{hash} roles=submit tenant=ada@vision", "tenant='ada@vision' is not a name"),
        ("{hash} roles=read colour=red", "colour"),
        ("{hash} roles=read\n{hash} roles=operate", "line 2"),
        ("a-token-in-plain-text", "64 hexadecimal digits"),
    ],
)
def test_a_wrong_line_is_named(line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as raised:
        parse_tokens(line.replace("{hash}", "sha256:" + "0" * 64))
    assert "plain-text" not in str(raised.value)


def test_every_name_of_a_node_can_stand_in_a_line() -> None:
    [caller] = parse_tokens(f"sha256:{'0' * 64} roles=node node=rack-1/n7:0").values()
    assert caller.node == "rack-1/n7:0"
