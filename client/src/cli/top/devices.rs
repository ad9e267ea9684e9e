//! The page of devices: what hardware there is, how it is, and who computes with it.

use hotcell_proto::v1;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    text::Line,
    widgets::{Paragraph, TableState, Wrap},
};

use super::{
    state::State,
    view::{CHOSEN, Column, table, titled},
};
use crate::cli::{
    json::DeviceView,
    operate,
    table::{bytes, time_of_day},
    ui::one_line,
};

/// Lines for all that is known of the chosen device.
const DETAILS: u16 = 9;
/// From this height on they are shown.
const ROOM: u16 = 15;

/// A device among all that is known.
struct Shown<'a> {
    device: &'a v1::Device,
    state: &'a State,
}

/// Draws all devices, and more about the one in this row; about the last one where there are fewer. The row.
pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, row: usize) -> usize {
    let row = row.min(state.devices.len().saturating_sub(1));
    let height = if area.height < ROOM { 0 } else { DETAILS };
    let [list, low] =
        Layout::vertical([Constraint::Min(3), Constraint::Length(height)]).areas(area);
    let devices = state.devices.iter();
    let devices: Vec<Shown<'_>> = devices.map(|device| Shown { device, state }).collect();
    let title = format!("Devices ({})", devices.len());
    let rows = table(&columns(), &devices, list.width).row_highlight_style(CHOSEN);
    let mut chosen = TableState::default();
    chosen.select((!devices.is_empty()).then_some(row));
    frame.render_stateful_widget(rows.block(titled(&title)), list, &mut chosen);
    if let Some(shown) = devices.get(row).filter(|_| height > 0) {
        let lines: Vec<Line<'_>> = shown.details().iter().map(|l| one_line(l).into()).collect();
        let title = one_line(&shown.device.id);
        let text = Paragraph::new(lines).wrap(Wrap { trim: false });
        frame.render_widget(text.block(titled(&title)), low);
    }
    row
}

fn columns<'a>() -> [Column<Shown<'a>>; 9] {
    let wide = Constraint::Length;
    [
        Column::new("DEVICE", wide(8), 0, |s| s.device.id.clone()),
        Column::new("BACKEND", wide(8), 60, |s| s.device.backend.clone()),
        Column::new("WORKERS", wide(16), 76, Shown::workers_in_words),
        Column::new("USED", wide(10), 44, |s| {
            s.used().map_or_else(|| "-".to_owned(), bytes)
        }),
        Column::new("MEMORY", wide(10), 60, |s| match s.memory() {
            0 => "-".to_owned(),
            all => bytes(all),
        }),
        Column::new("BUSY", wide(5), 110, |s| {
            let busy = s.device.gauge.as_ref().and_then(|g| g.utilization);
            busy.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", share * 100.0))
        }),
        Column::new("TEMP", wide(6), 110, |s| {
            let heat = s.device.gauge.as_ref().and_then(|g| g.temperature);
            heat.map_or_else(|| "-".to_owned(), |degrees| format!("{degrees:.0} °C"))
        }),
        Column::new("HEALTH", Constraint::Min(12), 0, Shown::health),
        Column::new("DESCRIPTION", Constraint::Min(20), 90, |s| {
            DeviceView::described(s.device, &s.state.devices)
        }),
    ]
}

/// A fault's name.
fn fault(fault: &v1::DeviceFault) -> String {
    match fault.what.as_str() {
        "" => format!("fault {}", fault.code),
        what => what.to_owned(),
    }
}

impl Shown<'_> {
    /// The workers that compute with it: its own, or those of the device that it is a member of.
    fn workers(&self) -> impl Iterator<Item = &v1::WorkerInfo> {
        let id = &self.device.id;
        let mut all = self.state.devices.iter();
        let leader = all.find(|d| d.members.contains(id));
        let device = leader.map_or(id, |leader| &leader.id);
        let leases =
            move |w: &&v1::WorkerInfo| w.lease.as_ref().is_some_and(|l| l.device == *device);
        self.state.workers.iter().filter(leases)
    }

    /// Their names, and the states of those that do not serve.
    fn workers_in_words(&self) -> String {
        let named = self.workers().map(|worker| match worker.state() {
            v1::WorkerState::Ready | v1::WorkerState::Standby => worker.id.clone(),
            _ => format!("{} {}", worker.id, operate::state(worker)),
        });
        match named.collect::<Vec<_>>() {
            none if none.is_empty() => "-".to_owned(),
            some => some.join(", "),
        }
    }

    /// Bytes of its memory that are in use, as its driver tells. Where the memory is the host's and nobody tells, what its
    /// workers have resident.
    fn used(&self) -> Option<u64> {
        let told = self.device.gauge.as_ref();
        if let Some(told) = told.and_then(|g| g.memory_used_bytes) {
            return Some(told);
        }
        let hosts = self.device.backend == "cpu" || self.device.integrated;
        let resident = self.workers().map(|w| w.resident_bytes);
        hosts.then(|| resident.fold(0, u64::saturating_add))
    }

    /// Bytes of its memory; 0: not known.
    fn memory(&self) -> u64 {
        let told = self.device.gauge.as_ref().and_then(|g| g.memory_bytes);
        told.unwrap_or(self.device.memory_bytes)
    }

    /// Why it cannot be used, or what went wrong with it.
    fn health(&self) -> String {
        if !self.device.problem.is_empty() {
            return self.device.problem.clone();
        }
        let gauge = self.device.gauge.as_ref();
        let errors = gauge.and_then(|g| g.ecc_uncorrected).filter(|&n| n > 0);
        let parts = [
            errors.map(|n| format!("{n} memory errors")),
            gauge.and_then(|g| g.faults.last()).map(fault),
        ];
        match parts.into_iter().flatten().collect::<Vec<_>>() {
            none if none.is_empty() => "ok".to_owned(),
            some => some.join(", "),
        }
    }

    /// All that is known of it, in lines.
    fn details(&self) -> Vec<String> {
        let device = self.device;
        let cores = match device.cores.len() {
            0 => String::new(),
            1 => "1 core".to_owned(),
            many => format!("{many} cores"),
        };
        let known = |what: &str, text: &str| match text {
            "" => String::new(),
            text => format!("{what} {text}"),
        };
        let list = |parts: Vec<String>| {
            let some = parts.into_iter().filter(|part| !part.is_empty());
            some.collect::<Vec<_>>().join(", ")
        };
        let mut lines = vec![
            DeviceView::described(device, &self.state.devices),
            known("cannot be used:", &device.problem),
            list(vec![
                known("backend", &device.backend),
                known("path", &device.path),
                cores,
                known("driver", &device.driver),
                known("at", &device.pci_id),
                known("served by", &device.program),
            ]),
        ];
        lines.extend(self.workers().map(|worker| {
            let leased = worker.lease.as_ref().map_or(0, |l| l.memory_bytes);
            list(vec![
                format!("{} is {}", worker.id, operate::state(worker)),
                match leased {
                    0 => String::new(),
                    leased => format!("{} leased", bytes(leased)),
                },
                known("has", &worker.models.join(" ")),
            ])
        }));
        let Some(gauge) = &device.gauge else {
            lines.retain(|line| !line.is_empty());
            return lines;
        };
        let watts = match (gauge.power_watts, gauge.power_limit_watts) {
            (Some(now), Some(most)) => format!("{now:.0} of {most:.0} W"),
            (Some(now), None) => format!("{now:.0} W"),
            (None, _) => String::new(),
        };
        let errors = |count: Option<u64>, which: &str| {
            let count = count.filter(|&n| n > 0);
            count.map_or_else(String::new, |n| format!("{n} memory errors {which}"))
        };
        lines.push(list(vec![
            watts,
            errors(gauge.ecc_corrected, "corrected"),
            errors(gauge.ecc_uncorrected, "not corrected"),
        ]));
        // The newest first: what does not fit is below.
        let faults = gauge.faults.iter().rev();
        lines.extend(faults.map(|f| format!("{}  {}", time_of_day(f.time_ms), fault(f))));
        lines.retain(|line| !line.is_empty());
        lines
    }
}

#[cfg(test)]
mod tests {
    use ratatui::crossterm::event::KeyCode;

    use super::super::{
        feed::{Lists, Update},
        state::{
            Page,
            tests::{host, press},
        },
        view::tests::{line, shown},
    };
    use super::*;

    fn device(id: &str, backend: &str) -> v1::Device {
        v1::Device {
            id: id.into(),
            backend: backend.into(),
            description: format!("the {backend}\u{1b}[2J"),
            memory_bytes: 64 << 30,
            ..v1::Device::default()
        }
    }

    /// A processor that two workers have, an accelerator, its member, and one that cannot be used.
    fn devices() -> State {
        let mut state = host();
        let mut workers = state.workers.clone();
        for worker in &mut workers {
            worker.resident_bytes = 1 << 30;
        }
        let lease = workers[1].lease.as_mut().unwrap();
        lease.device = "cuda:0".into();
        workers[1].state = v1::WorkerState::Quarantined.into();
        let gauge = v1::DeviceGauge {
            utilization: Some(0.5),
            memory_bytes: Some(80 << 30),
            memory_used_bytes: Some(3 << 30),
            power_watts: Some(350.0),
            power_limit_watts: Some(700.0),
            temperature: Some(61.0),
            ecc_uncorrected: Some(2),
            faults: vec![v1::DeviceFault {
                time_ms: 3_723_004,
                code: 79,
                what: "fell off the bus".into(),
            }],
            ..v1::DeviceGauge::default()
        };
        let devices = vec![
            device("cpu:0", "cpu"),
            v1::Device {
                gauge: Some(gauge),
                members: vec!["cuda:1".into()],
                ..device("cuda:0", "cuda")
            },
            device("cuda:1", "cuda"),
            v1::Device {
                problem: "its driver is too old: 470, and 525 is wanted".into(),
                ..device("cuda:2", "cuda")
            },
        ];
        let models = state.models.clone();
        state.take(Update::Lists(Lists {
            workers,
            models,
            devices,
        }));
        state
    }

    #[test]
    fn all_devices_are_shown_and_why_one_cannot_be_used() {
        let mut state = devices();
        let text = shown(&mut state, (140, 30));
        assert!(text.contains("4 devices (1 cannot be used)"), "{text}");
        press(&mut state, KeyCode::Char('v'));
        let text = shown(&mut state, (180, 30));
        let cpu = "cpu w0 1.0 GiB 64.0 GiB - - ok".split(' ');
        assert_eq!(
            line(&text, "cpu:0")[1..10],
            cpu.collect::<Vec<_>>()[..],
            "{text}"
        );
        let cuda = "cuda w1 quarantined 3.0 GiB 80.0 GiB 50% 61 °C 2 memory errors,".split(' ');
        assert_eq!(
            line(&text, "cuda:0")[1..14],
            cuda.collect::<Vec<_>>()[..],
            "{text}"
        );
        assert_eq!(
            line(&text, "cuda:1")[1..5],
            ["cuda", "w1", "quarantined", "-"]
        );
        let refused = line(&text, "cuda:2");
        assert!(refused[2] == "-" && refused.contains(&"driver"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        // All of what is known about the one that is looked at.
        press(&mut state, KeyCode::Down);
        let text = shown(&mut state, (80, 30));
        assert!(text.contains("w1 is quarantined, has kjv"), "{text}");
        assert!(
            text.contains("350 of 700 W, 2 memory errors not corrected"),
            "{text}"
        );
        assert!(text.contains("01:02:03.004  fell off the bus"), "{text}");
        press(&mut state, KeyCode::End);
        assert_eq!(state.page, Page::Devices(3));
        let text = shown(&mut state, (80, 30));
        assert!(text.contains("470, and 525 is wanted"), "{text}");
        // In a low and narrow terminal the chosen one is there, and its health.
        let text = shown(&mut state, (40, 7));
        let refused = line(&text, "cuda:2");
        assert_eq!(refused[..3], ["cuda:2", "its", "driver"], "{text}");
        // Devices that are gone are not looked at.
        let (workers, models) = (state.workers.clone(), state.models.clone());
        state.take(Update::Lists(Lists {
            workers,
            models,
            devices: Vec::new(),
        }));
        assert!(shown(&mut state, (80, 30)).contains("Devices (0)"));
        assert_eq!(press(&mut state, KeyCode::Esc), None);
        assert_eq!(state.page, Page::Overview);
    }
}
