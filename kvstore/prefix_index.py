"""The prefix index: which page holds which full page of prompt, who uses it, and which goes first when room is needed.

A tree: a node is one page of tokens after those of its parent, found by its chained key. Rows and session pins use
paths from the root down, so whatever is in use has an ancestry in use, and both "is known" and "is in use" hold for
the leading keys of a chain only: questions about a chain are binary searches. Nodes that nobody uses stand in one
order, least recently used first and every node before its parent; the first is therefore always a leaf, and evicting
it takes nothing from anybody. Owns nodes, that order and pins, and one ledger hold a node. Must not know tokens,
requests, clocks or how many pages are wanted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from epicycle.kvstore.ledger import Hold, Ledger


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. `rows` count live page tables that hold it, `pins` the sessions that keep it."""

    key: bytes
    page: int
    hold: int
    parent: Node | None
    children: int = 0
    rows: int = 0
    pins: int = 0
    is_listed: bool = True

    @property
    def is_used(self) -> bool:
        return self.rows > 0 or self.pins > 0


@dataclass(slots=True, eq=False)
class Chain:
    """One row's part in the index: its keys, the leading nodes whose pages are in its table, and when it came."""

    keys: Sequence[bytes]
    nodes: list[Node]
    generation: int


@dataclass(slots=True)
class _Session:
    nodes: list[Node] = field(default_factory=list)
    until_s: float = 0.0


class PrefixIndex:
    """Nodes over one ledger's pages. A page is listed by at most one node."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[bytes, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()  # nobody uses them; a node stands before its parent
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()  # the next to end first
        self._generation = 0  # counts resets
        self.unreferenced_pages = 0  # listed and in no row's table: idle or pinned
        self.pinned_pages = 0
        self.evicted_pages = 0  # so far

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def idle_pages(self) -> int:
        """What `evict` could free."""
        return len(self._idle)

    def known(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have a page."""
        return self._leading(keys, lambda node: True)

    def in_rows(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have a page that a live row holds."""
        return self._leading(keys, lambda node: node.rows > 0)

    def in_use(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have a page that a live row holds or a session pins."""
        return self._leading(keys, lambda node: node.is_used)

    def join(self, keys: Sequence[bytes], hits: int) -> Chain:
        """A row is about to share the pages of the first `hits` keys, all known. Close the chain when it ends."""
        chain = Chain(keys, [self._nodes[key] for key in keys[:hits]], self._generation)
        for node in chain.nodes:
            self._use(node)
        return chain

    def publish(self, chain: Chain, pages: Sequence[int]) -> None:
        """The row has computed all its full prompt pages; `pages` is its page table, which still holds them.

        Pages not known yet are listed. Where an equal page is listed that no row uses, this row's takes its place, so
        that a prefix is not kept twice. Where another row uses it the rest waits for `close`: a node in use needs its
        ancestors in use, and this row doesn't use those.
        """
        if chain.generation != self._generation:
            return
        for at in range(len(chain.nodes), len(chain.keys)):
            node = self._nodes.get(chain.keys[at])
            if node is None:
                node = self._list(chain.keys[at], pages[at], chain.nodes[-1] if chain.nodes else None)
            elif node.rows:
                return
            else:
                self._ledger.drop(node.hold)
                node.page, node.hold = pages[at], self._ledger.hold(Hold.PREFIX, (pages[at],))
            self._use(node)
            chain.nodes.append(node)

    def close(self, chain: Chain, pages: Sequence[int] = ()) -> None:
        """The row ends; its table must still hold its pages. With `pages` what `publish` left out is listed now."""
        if pages and chain.generation == self._generation:
            first = self.known(chain.keys)
            parent = self._nodes[chain.keys[first - 1]] if first else None
            for at in range(first, len(chain.keys)):
                parent = self._list(chain.keys[at], pages[at], parent)
        for node in chain.nodes:
            node.rows -= 1
            self.unreferenced_pages += node.rows == 0 and node.is_listed
        chain.nodes = []
        self._touch(self._path(chain.keys))

    def evict(self, pages: int) -> list[tuple[bytes, int]]:
        """Free the pages least recently used; there must be so many idle ones. Returns their keys and numbers."""
        assert pages <= len(self._idle), (pages, len(self._idle))
        self.evicted_pages += pages
        evicted: list[tuple[bytes, int]] = []
        for _ in range(pages):
            node, _ = self._idle.popitem(last=False)
            assert node.children == 0, "a node stands before its parent"
            evicted.append((node.key, node.page))
            self._unlist(node)
        return evicted

    def has_pin(self, session: Hashable) -> bool:
        return session in self._sessions

    def pin(self, session: Hashable, keys: Sequence[bytes], until_s: float, most_pages: int) -> None:
        """Keep the known pages of `keys` for `session` until then, instead of what it kept before.

        All pins together keep at most `most_pages`: those pinned longest ago give way, then the end of this chain.
        """
        path = self._path(keys)[:most_pages]
        for node in path:
            node.pins += 1
            self.pinned_pages += node.pins == 1
            self._idle.pop(node, None)
        self._unpin(session)
        while self.pinned_pages > most_pages:
            self._unpin(next(iter(self._sessions)))
        if path:
            self._sessions[session] = _Session(path, until_s)

    def unpin_until_idle(self, pages: int) -> None:
        """End pins, those made longest ago first, until so many pages are idle; no row may use that many."""
        while len(self._idle) < pages:
            self._unpin(next(iter(self._sessions)))

    def expire(self, now_s: float) -> None:
        """End the pins whose time is over; they must have been made in the order of their times."""
        while self._sessions and next(iter(self._sessions.values())).until_s <= now_s:
            self._unpin(next(iter(self._sessions)))

    def reset(self) -> None:
        """Forget everything, pins too. Pages of live rows stay theirs, and won't be listed when they end."""
        while self._sessions:
            self._unpin(next(iter(self._sessions)))
        for node in list(self._nodes.values()):
            self._unlist(node)
        self._idle.clear()
        self._generation += 1

    def _leading(self, keys: Sequence[bytes], holds: Callable[[Node], bool]) -> int:
        """How many leading keys name a node of which it holds, given that it holds for every ancestor of such a one."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            node = self._nodes.get(keys[middle])
            if node is not None and holds(node):
                low = middle + 1
            else:
                high = middle
        return low

    def _path(self, keys: Sequence[bytes]) -> list[Node]:
        return [self._nodes[key] for key in keys[: self.known(keys)]]

    def _list(self, key: bytes, page: int, parent: Node | None) -> Node:
        node = self._nodes[key] = Node(key, page, self._ledger.hold(Hold.PREFIX, (page,)), parent)
        if parent is not None:
            parent.children += 1
        self.unreferenced_pages += 1
        self._idle[node] = None
        return node

    def _unlist(self, node: Node) -> None:
        del self._nodes[node.key]
        node.is_listed = False
        if node.parent is not None:
            node.parent.children -= 1
            node.parent = None
        self.unreferenced_pages -= node.rows == 0
        self._ledger.drop(node.hold)

    def _use(self, node: Node) -> None:
        self.unreferenced_pages -= node.rows == 0
        node.rows += 1
        self._idle.pop(node, None)

    def _touch(self, path: Sequence[Node]) -> None:
        """These were just used: behind everybody else in the order, the deepest first."""
        for node in reversed(path):
            if not node.is_used:
                self._idle[node] = None
                self._idle.move_to_end(node)

    def _unpin(self, session: Hashable) -> None:
        ended = self._sessions.pop(session, None)
        if ended is None:
            return
        for node in ended.nodes:
            node.pins -= 1
            self.pinned_pages -= node.pins == 0
        self._touch(ended.nodes)
