"""Proves what the same money buys: the paper's case against every mix by hand, and prices that make no sense."""

import msgspec
import pytest
from tests.unit.capacity.systems import paper

from prfaas.capacity import comparison, optimum
from prfaas.capacity.system import System
from prfaas.errors import ConfigError


def with_costs(offload: float | None, hub: float | None) -> System:
    system = paper().system
    return msgspec.structs.replace(
        system,
        offload=tuple(msgspec.structs.replace(pool, cost_per_hour=offload) for pool in system.offload),
        hub=tuple(msgspec.structs.replace(pool, cost_per_hour=hub) for pool in system.hub),
    )


def found(offload: float, hub: float) -> comparison.EqualCost:
    made = comparison.compare_costs(with_costs(offload, hub), paper().workload)
    assert made is not None
    return made


def test_a_hub_without_offload_gets_as_many_instances_as_the_money_buys():
    made = found(3.0, 1.5)
    assert made.described.cost_per_hour == pytest.approx(24)
    assert made.homogeneous.instances == {"pd": 16}
    without_offload = optimum.best(comparison._alone(with_costs(3.0, 1.5), 24), paper().workload)
    assert made.gain == pytest.approx(made.described.lambda_max / without_offload.lambda_max - 1)


def test_the_best_mix_is_the_best_of_all_that_the_money_buys():
    made, system, workload = found(2.0, 1.0), with_costs(2.0, 1.0), paper().workload
    mixes = [comparison._with_counts(system, (far, near)) for far in range(8) for near in range(1, 17 - 2 * far)]
    every = [optimum.best(one, workload).lambda_max for one in mixes if one.hub_instances >= (1 if one.offload else 2)]
    assert made.best_mix.lambda_max == pytest.approx(max(every))
    assert made.best_mix.cost_per_hour <= made.described.cost_per_hour
    assert made.gain_of_best_mix >= max(made.gain, 0)


def test_at_the_even_ratio_both_serve_as_much_and_above_it_a_hub_without_offload_does_better():
    ratio = found(2.0, 1.0).even_at_ratio
    assert found(ratio, 1.0).gain == pytest.approx(0, abs=0.08), "instances are whole"
    assert found(1.5 * ratio, 1.0).gain < 0 < found(0.5 * ratio, 1.0).gain


def test_without_prices_there_is_nothing_to_compare():
    assert comparison.compare_costs(with_costs(None, None), paper().workload) is None
    hub_only = optimum.homogeneous(with_costs(2.0, 1.0))
    assert comparison.compare_costs(hub_only, paper().workload) is None


def test_refuses_a_price_for_only_some_pools_by_name():
    with pytest.raises(ConfigError, match="costPerHour is given for pd and missing for prfaas"):
        comparison.compare_costs(with_costs(None, 1.0), paper().workload)


def test_prices_that_buy_no_hub_at_all_name_the_field():
    with pytest.raises(ConfigError, match=r"hub\.pd\.costPerHour is 1000"):
        comparison._alone(with_costs(0.1, 1000.0), 900.0)


@pytest.mark.parametrize("cost", [1e-12, 1e-86, 5e-324])
def test_a_hub_for_nothing_names_the_field(cost: float):
    with pytest.raises(ConfigError, match=r"hub\.pd\.costPerHour is .* check costPerHour"):
        comparison.compare_costs(with_costs(2.0, cost), paper().workload)


@pytest.mark.parametrize("cost", [1e-12, 1e-86, 5e-324])
def test_offload_for_nothing_is_counted(cost: float):
    assert found(cost, 2.0).best_mix.lambda_max > 0
