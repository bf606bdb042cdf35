"""The question and the setting of a section."""

from qkablate.report.charts import make_charts
from qkablate.report.page import render_page
from qkablate.report.render import render_chart
from qkablate.report.text.setting import format_question, format_setting

SIZES = ("variant=standard,no_q", "model.d_model=16,32", "seed=range(3)")


def test_question_names_arms_and_baseline(section):
    expected = "Is the test loss of no_q, shared_qk different from that of standard?"
    assert format_question(section) == expected


def test_claim_is_its_own_question(claimed):
    assert format_question(claimed(0.0, says="Keys alone are enough.")) == "Keys alone are enough."


def test_sweep_without_comparison_has_no_question(cached_world, section_of):
    world = cached_world("variant=no_q", "seed=0", "sweep.baseline=null")
    assert format_question(section_of(world)) == ""


def test_setting_names_data_size_length_rates_seeds_and_date(cached_world, loss_of, section_of):
    world = cached_world(*SIZES).finish(loss_of)
    for run, day in zip(world.runs(), ("03", "05"), strict=False):
        world.write(run, {"ended": f"2026-11-{day}T01:02:03+0000"})
    assert format_setting(section_of(world)) == (
        "text in bytes · 1 layer · d_model 16, 32 · heads 2 · context 16 · 12 steps · lr 0.001"
        " · n = 3 · 2026-11-03 to 2026-11-05"
    )


def test_setting_names_positions_unless_they_are_learned(cached_world, loss_of, section_of):
    world = cached_world("variant=standard,no_q", "model.position=rope,learned")
    assert " · positions rope, learned · " in format_setting(section_of(world.finish(loss_of)))
    world = cached_world("variant=standard,no_q")
    assert "positions" not in format_setting(section_of(world.finish(loss_of)))


def test_tuned_sweep_says_so(cached_world, loss_of, section_of):
    world = cached_world("variant=standard,no_q", "seed=range(2)", "sweep.tune=true")
    assert "tuned learning rates" in format_setting(section_of(world.finish(loss_of)))


def test_setting_is_on_the_page_and_in_files(section):
    setting = format_setting(section)
    assert f'<p class="setting">{setting}</p>' in render_page([section], "a page")
    chart = make_charts(section)[0]
    for part in setting.split(" · ")[:3]:
        assert part in render_chart(chart, "a sweep", "svg", setting).decode()
