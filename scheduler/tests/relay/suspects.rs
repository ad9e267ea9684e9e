//! Requests that kill workers, those that were only there, and standbys.

use super::*;

/// Workers that a request ran on, in order.
fn ran(house: &House, id: &str) -> Vec<String> {
    let ran = house.stage.ran.lock().unwrap();
    let of = ran.iter().filter(|(_, request)| request == id);
    of.map(|(worker, _)| worker.clone()).collect()
}

fn named(id: &str, prompt_ids: &[u32], tokens: u32) -> GenerateRequest {
    GenerateRequest {
        request_id: id.into(),
        prompt: prompt(prompt_ids),
        ..request(tokens)
    }
}

fn worker(house: &House, id: &str) -> Option<v1::WorkerInfo> {
    house.fleet.workers().into_iter().find(|w| w.id == id)
}

fn beside(house: &House) -> usize {
    let workers = house.fleet.workers();
    workers.iter().filter(|w| w.id.contains('.')).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_under_which_two_workers_died_goes_on_alone_and_ends_like_any_other() {
    let house = House::new(1).await;
    for at in [3, 5] {
        house.stage.act(Act::DieAt(at, Duration::from_millis(2)));
    }
    let said = house.generate(named("r", &[1, 2, 3], 16)).await.unwrap();
    said.check(&[1, 2, 3], 5, 16, 2);
    assert_eq!(ran(&house, "r"), ["w0", "w0", "w0.solo1"]);
    // The throw-away worker is thrown away.
    until(|| beside(&house) == 0).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_kills_a_worker_of_its_own_is_poison_and_others_go_on() {
    let house = House::new(2).await;
    house.ready(2).await;
    *house.stage.poison.lock().unwrap() = Some((666, 20));
    let all = (0..12u32).map(|i| {
        let house = &house;
        async move {
            match i {
                0 => house.generate(named("evil", &[666], 200)).await.map(drop),
                _ => {
                    let said = house
                        .generate(named(&format!("good-{i}"), &[i], 300))
                        .await?;
                    said.check(&[i], 5, 300, said.finished[0].deaths_survived);
                    Ok(())
                }
            }
        }
    });
    for (i, end) in futures_join(all).await.into_iter().enumerate() {
        if i > 0 {
            end.unwrap();
            continue;
        }
        let status = end.unwrap_err();
        assert_eq!(status.code(), Code::Internal);
        let error = Error::typed(&status).unwrap();
        assert_eq!(error.reason(), Reason::RequestPoisoned);
        assert_eq!(error.get("request_id"), Some("evil"));
        // Once more alone, should nobody else have been served there until then.
        let deaths: usize = error.get("deaths").unwrap().parse().unwrap();
        let evil = ran(&house, "evil");
        assert!((3..=6).contains(&deaths), "{evil:?}");
        assert_eq!(evil.len(), deaths);
        assert!(evil[2..].iter().all(|w| w.contains(".solo")), "{evil:?}");
    }
    until(|| beside(&house) == 0).await;
    house.ready(2).await;
    house.generate(named("after", &[1], 4)).await.unwrap();
    assert!(!ran(&house, "after")[0].contains("solo"));
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_that_kills_whoever_tokenises_it_costs_three_workers_and_no_stream() {
    let house = House::new(1).await;
    house.ready(1).await;
    let long = async {
        let said = house.generate(named("good", &[1], 4000)).await.unwrap();
        said.check(&[1], 5, 4000, said.finished[0].deaths_survived);
    };
    let deadly = async {
        until(|| house.stage.said.load(Ordering::SeqCst) > 0).await;
        let text = v1::TokenizeRequest {
            prompt: Some(Prompt {
                kind: Some(Kind::Text("always die".into())),
            }),
            ..v1::TokenizeRequest::default()
        };
        let end = house.tokens().tokenize(text).await;
        assert_eq!(reason(end), Reason::RequestPoisoned);
    };
    tokio::join!(long, deadly);
    until(|| beside(&house) == 0).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deaths_for_which_no_request_is_to_blame_make_no_suspects() {
    use hotcell_proto::exit::WorkerExit;
    let house = House::new(1).await;
    let code = WorkerExit::ModelChanged.code();
    *house.stage.exit_code.lock().unwrap() = Some(code);
    for at in 1..=5 {
        house.stage.act(Act::DieAt(at, Duration::from_millis(2)));
    }
    let said = house.generate(named("r", &[1, 2, 3], 16)).await.unwrap();
    said.check(&[1, 2, 3], 5, 16, 5);
    assert!(ran(&house, "r").iter().all(|w| w == "w0"));
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadline_and_cancellation_hold_for_a_request_that_runs_alone() {
    let house = House::new(1).await;
    for leaves in [false, true] {
        for at in [1, 2] {
            house.stage.act(Act::DieAt(at, Duration::from_millis(2)));
        }
        house.stage.act(Act::Stall);
        let mut asked = Request::new(request(16));
        if !leaves {
            asked.set_timeout(Duration::from_millis(1500));
        }
        let stream = house.tokens().generate(asked).await.unwrap();
        let mut stream = stream.into_inner();
        until(|| beside(&house) == 1).await;
        let alone = house.fleet.workers().into_iter().find(|w| w.id != "w0");
        let lease = alone.unwrap().lease.unwrap();
        assert_eq!(
            (lease.device.as_str(), lease.trust_domain.as_str()),
            ("cpu:0", "suspect")
        );
        if !leaves {
            let end = loop {
                match stream.message().await {
                    Ok(event) => assert!(event.is_some(), "it ended in order"),
                    Err(status) => break status,
                }
            };
            assert_eq!(end.code(), Code::DeadlineExceeded);
        }
        drop(stream);
        // Its worker ends with it.
        until(|| beside(&house) == 0).await;
        until(|| house.shared.admission.count() == 0).await;
    }
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_so_many_requests_run_alone_at_once() {
    let house = House::new(1).await;
    house.ready(1).await;
    let count = 2 * limits::MAX_SOLO_WORKERS as u32;
    let most = std::sync::atomic::AtomicUsize::new(0);
    let watching = async {
        loop {
            most.fetch_max(beside(&house), Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    // Each is there when the worker dies, twice.
    let all = (0..count).map(|i| {
        let house = &house;
        async move {
            let said = house.generate(named(&format!("r{i}"), &[i], 400)).await;
            let said = said.unwrap();
            said.check(&[i], 5, 400, said.finished[0].deaths_survived);
        }
    });
    for at in [50, 100] {
        house.stage.act(Act::DieAt(at, Duration::from_millis(2)));
    }
    tokio::select! {
        () = watching => {}
        _ = futures_join(all) => {}
    }
    assert!(most.load(Ordering::Relaxed) <= limits::MAX_SOLO_WORKERS);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_in_another_class_only_if_asked_and_says_where() {
    let house = House::with(2, |stage, config| {
        let mut classes = stage.classes.lock().unwrap();
        classes.insert("w0".into(), "fake/a".into());
        classes.insert("w1".into(), "fake/b".into());
        config.timeouts.resume = Duration::from_millis(300);
    })
    .await;
    house.ready(2).await;
    // w0 comes back as something else, so that its class is gone.
    let classes = &house.stage.classes;
    classes.lock().unwrap().insert("w0".into(), "fake/c".into());
    house.stage.act(Act::DieAt(3, Duration::from_millis(2)));
    let asked = GenerateRequest {
        continue_across: true,
        ..request(8)
    };
    let mut stream = house.tokens().generate(asked).await.unwrap().into_inner();
    let (mut said, mut marks) = (Said::default(), Vec::new());
    while let Some(event) = stream.message().await.unwrap() {
        let event = event.event.unwrap();
        if let Event::Delta(delta) = &event {
            marks.extend(delta.numerics.clone().map(|n| (said.ids.len(), n.id)));
        }
        said.hear(event);
    }
    // The fakes' classes give equal tokens.
    said.check(&[1, 2, 3], 5, 8, 1);
    let [(at, class)] = &marks[..] else {
        panic!("marked {marks:?}");
    };
    assert!(*at <= 3 && class != "fake/a", "{marks:?}");
    let finished = &said.finished[0];
    assert_eq!(finished.numerics.clone().unwrap().id, "fake/a");
    assert!(finished.receipt.clone().unwrap().continued_across);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_takes_over_and_another_one_is_made() {
    let house = House::with(1, |_, config| config.standby = true).await;
    let waiting = || {
        let standby = worker(&house, "w0.standby");
        standby.filter(|w| w.state() == WorkerState::Standby)
    };
    for epoch in 2..5 {
        until(|| waiting().is_some()).await;
        let standby = waiting().unwrap();
        assert_eq!(standby.models, ["m"]);
        house.stage.act(Act::DieAt(3, Duration::from_millis(2)));
        let said = house.generate(request(8)).await.unwrap();
        said.check(&[1, 2, 3], 5, 8, 1);
        let own = worker(&house, "w0").unwrap();
        assert_eq!((own.pid, own.epoch), (standby.pid, epoch));
    }
    // It is no place for requests while it waits.
    assert!(ran(&house, "").is_empty());
    let ran = house.stage.ran.lock().unwrap().clone();
    assert_eq!(ran.len(), 6);
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_that_does_not_answer_takes_no_place() {
    let house = House::with(1, |_, config| config.standby = true).await;
    let waiting = || {
        let standby = worker(&house, "w0.standby");
        standby.filter(|w| w.state() == WorkerState::Standby)
    };
    until(|| waiting().is_some()).await;
    let deaf = waiting().unwrap();
    let process = "w0.standby.1".to_owned();
    house.stage.deaf.lock().unwrap().push(process.clone());
    house.stage.act(Act::DieAt(3, Duration::from_millis(2)));
    let said = house.generate(request(8)).await.unwrap();
    said.check(&[1, 2, 3], 5, 8, 1);
    let own = worker(&house, "w0").unwrap();
    assert_eq!((own.epoch, own.deaths), (2, 1));
    assert_ne!(own.pid, deaf.pid);
    let report = house.fleet.crashes.get(&process).unwrap();
    assert_eq!(report.kind, "deadline", "{report:#?}");
    assert_eq!(report.pid, deaf.pid);
    until(|| waiting().is_some_and(|w| w.pid != deaf.pid)).await;
    house.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_kills_whatever_runs_on_it_makes_no_request_poison() {
    for company in [1, 2] {
        let house = House::with(1, |_, config| config.restart.budget = 1000).await;
        house.ready(1).await;
        house.stage.killers.lock().unwrap().push("w0".into());
        house.stage.company.store(company, Ordering::SeqCst);
        let all = (0..company as u32).map(|i| {
            let request = named(&format!("r{i}"), &[i], 8);
            house.generate(request)
        });
        for end in futures_join(all).await {
            // If one request only ever ran there it is all that is known.
            let right = match company {
                1 => Reason::RequestPoisoned,
                _ => Reason::WorkerLost,
            };
            assert_eq!(reason(end), right);
        }
        house.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspect_whose_device_is_in_doubt_is_run_alone_on_another_one() {
    let house = House::with(2, |_, config| {
        config.restart.budget = 1000;
        config.suspicion.suspect_after = 1;
    })
    .await;
    house.ready(2).await;
    house.stage.killers.lock().unwrap().push("w0".into());
    house.stage.company.store(4, Ordering::SeqCst);
    // Two on each.
    let streams = (0..4u32).map(|i| {
        let house = &house;
        async move {
            let said = house.generate(named(&format!("r{i}"), &[i], 300)).await;
            let said = said.unwrap();
            said.check(&[i], 5, 300, said.finished[0].deaths_survived);
            let ran = ran(house, &format!("r{i}"));
            (said.finished[0].deaths_survived, ran)
        }
    });
    let ends = futures_join(streams).await;
    let struck: Vec<_> = ends.iter().filter(|(deaths, _)| *deaths > 0).collect();
    assert_eq!(struck.len(), 2, "{ends:?}");
    for (deaths, ran) in struck {
        assert_eq!(*deaths, 2, "{ran:?}");
        assert_eq!(ran[0], "w0");
        assert!(ran[1].starts_with("w0.solo"), "{ran:?}");
        assert!(ran[2].starts_with("w1.solo"), "{ran:?}");
    }
    house.end().await;
}
