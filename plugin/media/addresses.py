"""Which addresses a media host may have: public ones alone, whatever its name says. Pure."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network

IPAddress = IPv4Address | IPv6Address
# Says why an address may not be connected to, or None. A deployment has no switch for it; tests,
# whose servers are on loopback, pass their own.
AddressPolicy = Callable[[IPAddress], str | None]

# IPv6 that carries an IPv4 address for some gateway to unpack: what it reaches cannot be judged.
_TRANSLATED = {
    "an IPv4-mapped": IPv6Network("::ffff:0:0/96"),
    "an IPv4-compatible": IPv6Network("::/96"),
    "an IPv4-translated": IPv6Network("::ffff:0:0:0/96"),
    "a NAT64": IPv6Network("64:ff9b::/96"),
    "a local NAT64": IPv6Network("64:ff9b:1::/48"),
    "a Teredo": IPv6Network("2001::/32"),
    "a 6to4": IPv6Network("2002::/16"),
}
_SITE_LOCAL = IPv6Network("fec0::/10")


def refuse_non_public(address: IPAddress) -> str | None:
    """The policy of every deployment."""
    # Most telling first: loopback and link-local addresses are private ones too.
    if address.is_unspecified:
        return "an unspecified address"
    if address.is_loopback:
        return "a loopback address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_multicast:
        return "a multicast address"
    if isinstance(address, IPv6Address):
        for name, network in _TRANSLATED.items():
            if address in network:
                return f"{name} address"
        if address in _SITE_LOCAL:
            return "a private address"
    # is_global knows what is_private does not: the shared range of carriers, 100.64.0.0/10.
    if address.is_private or not address.is_global:
        return "a private address"
    if address.is_reserved:
        return "a reserved address"
    return None
