//! The rules as seccomp filters.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use super::rules::{Answer, RULES, Rule, When, Zero};
use super::{Lack, Mode};

/// Adds all filters to the calling thread, and so to all threads and processes it starts later; where a device's libraries
/// have started threads already, to these as well.
pub(super) fn install(mode: Mode, has_devices: bool) -> Result<(), Lack> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| Lack::new("no filter for this architecture"))?;
    let programs = compile(mode, has_devices, std::process::id(), arch)
        .map_err(|error| Lack::new(format!("the filter does not compile: {error}")))?;
    for program in &programs {
        let apply = match has_devices {
            true => seccompiler::apply_filter_all_threads,
            false => seccompiler::apply_filter,
        };
        apply(program).map_err(|error| match error {
            seccompiler::Error::Seccomp(error)
                if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) =>
            {
                Lack::new("the kernel lacks it")
            }
            error => Lack::new(error.to_string()),
        })?;
    }
    Ok(())
}

/// A filter gives one answer, so there is one for each. The kernel takes the most severe of what they say, and the
/// last of them knows no difference but between listed and not: the others must never say anything about a call
/// that is not listed.
fn compile(
    mode: Mode,
    has_devices: bool,
    pid: u32,
    arch: TargetArch,
) -> Result<Vec<BpfProgram>, BackendError> {
    let mut filters: BTreeMap<Answer, BTreeMap<i64, Vec<SeccompRule>>> = BTreeMap::new();
    let mut listed: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for rule in RULES {
        let conditions = match rule.of.include(has_devices) {
            true => conditions(rule, mode, pid)?,
            false => None,
        };
        for (number, _) in rule.calls {
            listed.insert(*number, Vec::new());
            let (Answer::Errno(_) | Answer::Trap, Some(conditions)) = (rule.answer, &conditions)
            else {
                continue;
            };
            let filter = filters.entry(rule.answer).or_default();
            filter
                .entry(*number)
                .or_default()
                .extend_from_slice(conditions);
        }
    }
    let mut programs = Vec::with_capacity(filters.len() + 1);
    for (answer, rules) in filters {
        programs.push(
            SeccompFilter::new(rules, SeccompAction::Allow, action(answer), arch)?.try_into()?,
        );
    }
    // Last, because it no longer lets anybody add filters.
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    programs.push(SeccompFilter::new(listed, unknown, SeccompAction::Allow, arch)?.try_into()?);
    Ok(programs)
}

fn action(answer: Answer) -> SeccompAction {
    match answer {
        Answer::Allow => SeccompAction::Allow,
        Answer::Errno(errno) => SeccompAction::Errno(errno.unsigned_abs()),
        Answer::Trap => SeccompAction::Trap,
    }
}

/// The alternatives under which the rule's answer holds; none given means always, and `None` never.
fn conditions(rule: &Rule, mode: Mode, pid: u32) -> Result<Option<Vec<SeccompRule>>, BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    use SeccompCmpOp::{Eq, MaskedEq, Ne};
    let test = |arg, op, value: u32| SeccompCondition::new(arg, Dword, op, value.into());
    let each = |arg, op: &dyn Fn(u32) -> SeccompCmpOp, values: &[u32]| {
        let rules = values
            .iter()
            .map(|value| SeccompRule::new(vec![test(arg, op(*value), *value)?]));
        rules.collect::<Result<Vec<_>, _>>()
    };
    let none_of = |arg, values: &[u32]| {
        let tests = values.iter().map(|value| test(arg, Ne, *value));
        tests.collect::<Result<Vec<_>, _>>()
    };
    let all = |tests| Ok::<_, BackendError>(vec![SeccompRule::new(tests)?]);
    Ok(Some(match rule.when {
        When::Always => Vec::new(),
        When::In(only) if only == mode => Vec::new(),
        When::In(_) => return Ok(None),
        When::Not(arg, values) => all(none_of(arg, values)?)?,
        When::Is(arg, values) => each(arg, &|_| Eq, values)?,
        When::Bit(arg, bits) => each(arg, &|bit| MaskedEq(bit.into()), bits)?,
        When::NoBit(arg, bit) => all(vec![test(arg, MaskedEq(bit.into()), 0)?])?,
        When::NotNull(arg) => all(vec![SeccompCondition::new(arg, Qword, Ne, 0)?])?,
        When::NotSelf(arg, Zero::Own) => all(none_of(arg, &[0, pid])?)?,
        When::NotSelf(arg, Zero::Other) => all(none_of(arg, &[pid])?)?,
        When::IsBut(arg, value, other, values) => {
            let mut tests = vec![test(arg, Eq, value)?];
            tests.extend(none_of(other, values)?);
            all(tests)?
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_compile_for_each_mode_within_the_kernels_limit() {
        let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
        for mode in [Mode::Inherited, Mode::Listening] {
            for has_devices in [false, true] {
                let programs = compile(mode, has_devices, 1234, arch).unwrap();
                assert!(programs.len() > 4);
                // BPF_MAXINSNS.
                assert!(programs.iter().all(|program| program.len() <= 4096));
            }
        }
    }
}
