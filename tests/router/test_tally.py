"""What several processes have counted, as one page."""

from prometheus_client.parser import text_string_to_metric_families

from kvpush.router.asked import Local
from kvpush.router.dispatch import Path
from kvpush.router.journey import Ending
from kvpush.router.metrics import Metrics
from kvpush.router.tally import joined

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def nobody(waiting: int = 0) -> Metrics:
    return Metrics(list, lambda: waiting)


def page_of(*workers: Metrics) -> Series:
    text = workers[0].page(joined([one.tally() for one in workers])).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def requests(path: str, ending: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return "kvpush_router_requests_total", (("ending", ending), ("path", path))


def test_counters_add_up_series_by_series() -> None:
    one, other = nobody(), nobody()
    for _ in range(3):
        one.count(Path.PD, Ending.COMPLETE, tries=2, local=None)
    other.count(Path.PD, Ending.COMPLETE, tries=1, local=None)
    other.count(Path.LOCAL, Ending.CLIENT_LEFT, tries=1, local=Local.SHORT)
    page = page_of(one, other)
    assert page[requests("pd", "complete")] == 4
    assert page[requests("local", "client_left")] == 1
    assert page["kvpush_router_local_total", (("reason", "short_prompt"),)] == 1
    assert page["kvpush_router_retries_total", ()] == 3


def test_histograms_add_up_bucket_by_bucket() -> None:
    one, other = nobody(), nobody()
    one.first_byte(Path.PD, 0.015)
    other.first_byte(Path.PD, 0.003)
    other.first_byte(Path.PD, 100.0)
    page, name = page_of(one, other), "kvpush_router_first_byte_seconds"
    buckets = {dict(labels)["le"]: value for (series, labels), value in page.items() if series == f"{name}_bucket"}
    assert [buckets[le] for le in ("0.005", "0.01", "0.02", "60.0", "+Inf")] == [1, 1, 2, 2, 3]
    assert page[f"{name}_count", (("path", "pd"),)] == 3
    assert page[f"{name}_sum", (("path", "pd"),)] == 0.015 + 0.003 + 100.0


def test_gauge_of_waiting_requests_adds_up() -> None:
    assert page_of(nobody(2), nobody(), nobody(5))["kvpush_router_waiting", ()] == 7


def test_series_began_when_its_first_worker_did() -> None:
    one, other = nobody(), nobody()
    began = [page_of(worker)["kvpush_router_retries_created", ()] for worker in (one, other)]
    assert page_of(other, one)["kvpush_router_retries_created", ()] == min(began)


def test_page_of_one_worker_is_the_same_whether_it_is_added_up_or_not() -> None:
    one = nobody(3)
    one.count(Path.PD, Ending.COMPLETE, tries=1, local=None)
    one.first_byte(Path.PD, 0.015)
    assert one.page(joined([one.tally()])) == one.page(one.tally())
    assert page_of(one)[requests("pd", "complete")] == 1
