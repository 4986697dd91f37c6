"""Which addresses a media host may have."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from mindstream.plugin.media.addresses import refuse_non_public


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "a loopback address"),
        ("127.255.3.4", "a loopback address"),
        ("::1", "a loopback address"),
        ("0.0.0.0", "an unspecified address"),
        ("::", "an unspecified address"),
        ("169.254.169.254", "a link-local address"),
        ("fe80::1", "a link-local address"),
        ("10.0.0.1", "a private address"),
        ("172.16.0.1", "a private address"),
        ("192.168.1.1", "a private address"),
        ("100.64.0.1", "a private address"),
        ("0.1.2.3", "a private address"),
        ("192.0.2.1", "a private address"),
        ("198.18.0.1", "a private address"),
        ("fc00::1", "a private address"),
        ("fd12::1", "a private address"),
        ("fec0::1", "a private address"),
        ("2001:db8::1", "a private address"),
        ("224.0.0.1", "a multicast address"),
        ("ff02::1", "a multicast address"),
        ("240.0.0.1", "a private address"),
        ("255.255.255.255", "a private address"),
        ("::ffff:127.0.0.1", "an IPv4-mapped address"),
        ("::ffff:8.8.8.8", "an IPv4-mapped address"),
        ("::7f00:1", "an IPv4-compatible address"),
        ("::ffff:0:7f00:1", "an IPv4-translated address"),
        ("64:ff9b::7f00:1", "a NAT64 address"),
        ("64:ff9b:1::a00:1", "a local NAT64 address"),
        ("2002:7f00:1::", "a 6to4 address"),
        ("2001:0:4136:e378::1", "a Teredo address"),
    ],
)
def test_refused(address: str, reason: str) -> None:
    assert refuse_non_public(ip_address(address)) == reason


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "2a00::1"])
def test_public(address: str) -> None:
    assert refuse_non_public(ip_address(address)) is None
