"""What goes from node to node, as the page draws it."""

from __future__ import annotations

from kvferry.router.dashboard.flows import ARROW_WIDTHS, BOX, SIDE, SIDE_MARGIN, transfers
from kvferry.router.dashboard.state import Blocks, Node, Transfer


def node(name: str, role: str, trouble: str = "") -> Node:
    return Node(
        id=name, role=role, model="m", state="ready", trouble=trouble,
        blocks=Blocks(active=1, cached=2, granted=3, free=4, total=10), running=2, most_running=8, waiting=0,
        waiting_tokens=0, streams=1, prefill_tokens_per_s=1000, step_s=0.02, ship_bytes_per_s=1e9,
    )  # fmt: skip


def transfer(source: str, target: str, rate: float, kind: str = "ship") -> Transfer:
    return Transfer(kind=kind, source=source, target=target, transfers=1, blocks=1, bytes_per_s=rate)


def test_prefill_stands_left_and_decode_right_and_arrows_are_as_thick_as_what_flows() -> None:
    nodes = [node("p1", "prefill"), node("p2", "prefill", "stalled"), node("d1", "decode")]
    picture = transfers(nodes, [transfer("p1", "d1", 4e6), transfer("p2", "d1", 1e6), transfer("gone", "d1", 9.0)])
    boxes = {box.name: box for box in picture.boxes}
    assert boxes["p1"].x == boxes["p2"].x < boxes["d1"].x
    assert boxes["p1"].y < boxes["d1"].y < boxes["p2"].y
    assert (boxes["p2"].told, boxes["p2"].trouble, boxes["p1"].told) == ("stalled", True, "2 running")
    assert [(arrow.transfer.source, arrow.width) for arrow in picture.arrows] == [
        ("p1", ARROW_WIDTHS[1]), ("p2", ARROW_WIDTHS[0] + (ARROW_WIDTHS[1] - ARROW_WIDTHS[0]) / 2),
    ]  # fmt: skip
    for arrow in picture.arrows:
        assert 152 < arrow.x < 402
        assert 0 < arrow.y < picture.height
    assert transfers([], []).boxes == []


def test_where_there_are_too_many_nodes_the_busy_ones_are_drawn() -> None:
    nodes = [node(f"p{n:02}", "prefill") for n in range(30)] + [node("d", "decode")]
    picture = transfers(nodes, [transfer("p29", "d", 5.0)])
    assert len(picture.boxes) == SIDE + 1
    assert "p29" in {box.name for box in picture.boxes}
    assert picture.left_out == 30 - SIDE


def test_copies_go_back_and_moves_go_beside_their_column() -> None:
    nodes = [node("p", "prefill"), node("d1", "decode"), node("d2", "decode")]
    found = [transfer("p", "d1", 4e6), transfer("d1", "p", 1e6, "copy"), transfer("d1", "d2", 2e6, "move")]
    picture = transfers(nodes, found)
    boxes = {box.name: box for box in picture.boxes}
    ship, copy, move = picture.arrows
    assert picture.width == transfers(nodes, found[:2]).width + SIDE_MARGIN
    assert boxes["p"].x + BOX[0] < copy.x < ship.x < boxes["d1"].x, "each label is where its arrow ends"
    assert boxes["d2"].x + BOX[0] < move.x < picture.width
    assert ship.y != copy.y, "what goes to and fro between two nodes is told apart"
    assert all(0 < arrow.y < picture.height for arrow in picture.arrows)
